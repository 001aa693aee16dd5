"""lightning_prefill: pieces of prompts through everything between a lightning layer's projections."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from jaxtyping import BFloat16, Float32, Int32
from torch import Tensor

from reference.random import integers, stream_key
from workbench.contract import Axis, Contract, Cost, Expected, Output, Tolerance, Workload, workloads
from workbench.ops.lightning_decode import (
    DIM,
    SPARE_SLOTS,
    draw_norms,
    draw_projections,
    draw_slots,
    draw_states,
    spaced,
)

OP = "lightning_prefill"
TAIL = 5
"""Rows after the last sequence's in the regime `padded`, which nobody may touch."""
LEANING = 0.5
"""Share of its query in each key. The first token of a fresh state reads (q·k)·v, and the output norm takes its size
away: where q·k nearly cancels in one head, rounding decides the ratio of the heads, and no tolerance can judge it."""
STILL_TOKENS = 64
"""Longest piece in the regime `still`: after more, the states of the fast heads leave float32's normal range."""
REFERENCE_TOKENS = 2048
"""Tokens the reference takes at once over all sequences, to bound its float64 scratch."""

REGIMES = ("ordinary", "large", "tiny", "correlated", "uneven", "still", "fresh", "ragged", "padded", "strided")
"""As in `lightning_decode` (`still` pieces are short and go on from a state); `fresh`: every sequence begins, in slots
full of NaN; `ragged`: lengths from none at all to the longest; `padded`: every third sequence is padding, and rows
follow the last sequence's."""


def signature(
    qkvz: BFloat16[Tensor, "tokens 4*heads*128"],
    q_norm: BFloat16[Tensor, "128"],
    k_norm: BFloat16[Tensor, "128"],
    o_norm: BFloat16[Tensor, "heads*128"],
    cu_seqlens: Int32[Tensor, "batch+1"],
    start: Int32[Tensor, "batch"],
    slots: Int32[Tensor, "batch"],
    state: Float32[Tensor, "slots heads 128 128"],
    out: BFloat16[Tensor, "tokens heads*128"],
) -> None:
    """Take a piece of each sequence through the recurrence of `lightning_decode`, token after token.

    Sequence b owns the rows `cu_seqlens[b]` … `cu_seqlens[b+1]`−1; its token i stands at position `start[b]` + i.
    With `start[b]` = 0 the state is zero before the first token, whatever its slot holds; otherwise it goes on from
    `state[slots[b]]`. The state after the last token is written to the slot. Norms, rotation, decay, read-out,
    output norm and gate are those of `lightning_decode`, and so are the roundings.

    Mutated: `state` of the slots named, and `out`. A sequence with slot −1 (and start −1) is padding, one without
    tokens has nothing to do, rows from `cu_seqlens[batch]` on belong to nobody: all of these touch nothing. No slot
    is named twice. Leading dimensions may be strided, the last never is.
    """


AXES = {
    "batch": Axis(1, "sequences", high=128),
    "tokens": Axis(8192, "tokens of the longest sequence's piece", high=16384),
    "heads": Axis(32, "heads of 128 channels", high=64),
    "context": Axis(65536, "keys of the longest sequence after its piece", high=1 << 21),
}


def make_inputs(workload: Workload, seed: int, regime: str, device: torch.device) -> dict[str, Any]:
    """Every argument by name. The first sequence ends at the context; of the others every second begins afresh."""
    batch, tokens, heads = workload["batch"], workload["tokens"], workload["heads"]
    before = max(0, workload["context"] - tokens)
    starts = integers(stream_key(OP, seed, regime, "start"), (batch,), before + 1)
    starts[0], starts[1::2] = before, 0
    lengths = torch.full((batch,), tokens)
    tail = TAIL if regime == "padded" else 0
    if regime == "still":
        lengths.clamp_(max=STILL_TOKENS)
        starts.clamp_(min=1)
    if regime == "fresh":
        starts[:] = 0
    if regime == "ragged":
        lengths[1:] = integers(stream_key(OP, seed, regime, "lengths"), (batch - 1,), tokens + 1)
        lengths[1:2], lengths[2:3] = 1, 0
    cu_seqlens = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).to(device, torch.int32)
    rows = int(lengths.sum()) + tail
    qkvz = draw_projections(OP, seed, regime, rows, heads, device, LEANING)
    state = draw_states(OP, seed, regime, batch + SPARE_SLOTS, heads, device)
    slots = draw_slots(OP, seed, regime, batch, device)
    if regime == "padded":
        for b in range(1, batch, 3):
            slots[b] = starts[b] = -1
            qkvz[b * tokens : (b + 1) * tokens] = torch.nan
        qkvz[rows - tail :] = torch.nan
    if regime in ("fresh", "padded"):
        going_on = torch.zeros(state.shape[0], dtype=torch.bool, device=device)
        going_on[slots[(starts > 0).to(device)].long()] = True
        state[~going_on] = torch.nan
    out = torch.empty(rows, heads * DIM, dtype=torch.bfloat16, device=device)
    if regime == "strided":
        qkvz, out = spaced(qkvz), spaced(out)
    return {
        "qkvz": qkvz,
        **draw_norms(OP, seed, regime, heads, device),
        "cu_seqlens": cu_seqlens,
        "start": starts.to(device, torch.int32),
        "slots": slots,
        "state": state,
        "out": out,
    }


def reference(law: ModuleType, args: Mapping[str, Any], precision: Any) -> dict[str, Expected]:
    """The law for every sequence, all of them side by side for as long as they last.

    Sorted by length, the sequences still running are a prefix of the batch; each stretch of tokens in which none
    ends is one call of the law, cut so that it holds `REFERENCE_TOKENS` tokens at most. Splits change no bit.
    """
    wide = precision is law.numerics.ORACLE
    device = args["qkvz"].device
    bounds = args["cu_seqlens"].tolist()
    lengths = [end - begin for begin, end in zip(bounds, bounds[1:])]
    alive = [b for b in range(len(lengths)) if lengths[b] > 0 and args["slots"][b] >= 0]
    alive.sort(key=lambda b: -lengths[b])
    order = torch.tensor(alive, dtype=torch.long, device=device)
    begins, starts = args["cu_seqlens"][:-1][order].long(), args["start"][order].long()
    slots = args["slots"][order].long()

    state = args["state"].to(torch.float64 if wide else torch.float32, copy=True)
    current = torch.where((starts == 0)[:, None, None, None], 0.0, state[slots])
    out = torch.zeros(args["out"].shape, dtype=torch.float64 if wide else torch.bfloat16, device=device)
    norms = (args["q_norm"], args["k_norm"], args["o_norm"])
    at, running = 0, len(alive)
    while running:
        step = min(lengths[alive[running - 1]] - at, max(1, REFERENCE_TOKENS // running))
        steps = torch.arange(at, at + step, device=device)
        rows, positions = begins[:running, None] + steps, starts[:running, None] + steps
        result, after = law.lightning.lightning_mixer(
            args["qkvz"][rows], *norms, positions, current[:running], precision
        )
        out[rows], current[:running] = result, after
        at += step
        while running and lengths[alive[running - 1]] == at:
            running -= 1
    state[slots] = current

    owner = torch.zeros(out.shape[0], dtype=torch.bool, device=device)
    for b in alive:
        owner[bounds[b] : bounds[b + 1]] = True
    touched = torch.zeros(state.shape[:2], dtype=torch.bool, device=device)
    touched[slots] = True
    return {"state": Expected(state, touched), "out": Expected(out, owner)}


def cost(workload: Workload) -> Cost:
    """Projections read and outputs written once, each state read and written once (a fresh one is only written).

    FLOPs are those of the token recurrence, outer product and read-out; a chunked form spends about twice as many.
    """
    batch, tokens, heads = workload["batch"], workload["tokens"], workload["heads"]
    row, states = heads * DIM, batch * heads * DIM * DIM
    fresh = batch // 2 + (workload["context"] <= tokens) * (batch - batch // 2)
    read = 2 * batch * tokens * 4 * row + 4 * states * (batch - fresh) // batch + 2 * (row + 2 * DIM) + 12 * batch + 4
    written = 2 * batch * tokens * row + 4 * states
    return Cost(flops=4.0 * states * tokens, bytes_read=read, bytes_written=written)


def _sizes(preset: str, *sizes: tuple[int, int, int]) -> tuple[Workload, ...]:
    return workloads(OP, AXES, preset, *({"batch": b, "tokens": t, "context": c} for b, t, c in sizes))


def _small(preset: str, *sizes: tuple[int, int, int]) -> tuple[Workload, ...]:
    return tuple(w.replace(heads=2) for w in _sizes(preset, *sizes))


PRESETS = {
    "smoke": workloads(
        OP,
        AXES,
        "smoke",
        {"batch": 1, "tokens": 63, "heads": 2, "context": 63},
        {"batch": 3, "tokens": 65, "heads": 2, "context": 8192},
        {"batch": 2, "tokens": 20, "heads": 3, "context": 1000},
    ),
    "prefill": _sizes(
        "prefill",
        (1, 1024, 1024),
        (1, 8192, 8192),
        (1, 8192, 65536),
        (1, 16384, 16384),
        (8, 1024, 8192),
        (32, 256, 4096),
        (128, 64, 4096),
    ),
    "long": _sizes("long", (1, 8192, 1 << 20), (1, 16384, 1 << 20), (1, 16384, 1 << 21)),
    "race": _sizes(
        "race", (1, 8192, 1 << 15), (1, 8192, 1 << 17), (1, 8192, 1 << 19), (2, 4096, 1 << 17), (8, 1024, 1 << 15)
    ),
}

CONTRACT = Contract(
    name=OP,
    summary="lightning layer, pieces of prompts: head norms, rotation, recurrence, norm, gate; states carried",
    signature=signature,
    axes=AXES,
    outputs={
        # Chunked kernels round λ^n·k or λ^n·v to bfloat16, one rounding beside the law's three: up to 0.86 of twice
        # the law's own error in single elements.
        "state": Output(Tolerance.ORACLE, inout=True, row_dims=2, multiple=2.5, floor=2.0**-16),
        "out": Output(Tolerance.ORACLE),
    },
    make_inputs=make_inputs,
    reference=reference,
    cost=cost,
    presets=PRESETS,
    regimes=REGIMES,
    weights=("q_norm", "k_norm", "o_norm"),
    gate_workloads=_small(
        "gate",
        (1, 1, 64),
        (3, 64, 64),
        (1, 127, 127),
        (2, 128, 8193),
        (1, 129, 8191),
        (1, 200, 1 << 21),
    ),
)
