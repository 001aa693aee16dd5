"""The lightning law bent one rule at a time, for `lightning_prefill`: those of the decode op, and those of pieces."""

from __future__ import annotations

from workbench.contract import Mutant
from workbench.mutants.lightning_decode import ALLOWED, AROUND, RECURRENCE

_EMPTY = "read = torch.empty(q.shape, dtype=torch.float64, device=q.device)\n    for t in range(tokens):"


def _recurrence(name: str, rule: str, old: str, new: str, caught_by: str = "ordinary") -> Mutant:
    return Mutant(name, rule, "lightning.py", old, new, caught_by)


PIECES = (
    _recurrence(
        "tail_dropped",
        "tokens past the last whole chunk of 64 count",
        _EMPTY,
        _EMPTY.replace("empty", "zeros").replace("(tokens)", "(tokens // 64 * 64 or tokens)"),
    ),
    _recurrence(
        "last_token_not_in_the_state",
        "the state returned is that after the last token",
        "return bf16(f32(read, precision), precision), f32(state, precision)",
        "return bf16(f32(read, precision), precision), f32(\n"
        "        (state - key[..., -1, :, :, None] * value[..., -1, :, None, :]) / decay, precision\n"
        "    )",
    ),
    _recurrence(
        "chunk_boundary_undecayed",
        "the state decays from chunk to chunk as within one",
        "state.mul_(decay)",
        "state.mul_(decay if t % 16 != 15 else 1.0)",
    ),
    _recurrence(
        "chunk_forgets",
        "the state is carried from chunk to chunk",
        "state.mul_(decay)",
        "state.mul_(decay if t % 16 else 0.0)",
    ),
    _recurrence(
        "previous_token_unseen",
        "a token sees every earlier one",
        "scaled[..., t, :, None, :], state, out",
        "scaled[..., t, :, None, :], state\n"
        "            - (t > 0) * decay * key[..., t - 1, :, :, None] * value[..., t - 1, :, None, :], out",
    ),
    _recurrence(
        "state_grows_stale",
        "outputs read the state of their own token, not that at the chunk's start",
        "torch.matmul(scaled[..., t, :, None, :], state, out",
        "held = state.clone() if t % 16 == 0 else held\n        torch.matmul(scaled[..., t, :, None, :], held, out",
    ),
    Mutant(
        "positions_from_zero",
        "a piece goes on at its start, not at position 0",
        "rope.py",
        "positions.to(torch.float32).double()",
        "(positions - positions[..., :1]).to(torch.float32).double()",
    ),
)
"""Bent rules that only show over several tokens."""

MUTANTS = RECURRENCE + PIECES + AROUND + ALLOWED
