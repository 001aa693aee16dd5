"""Lightning layer: slopes, the order of decay and update, splits, and where it rounds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from reference.lightning import decays, lightning_mixer, recurrence, slopes
from reference.numerics import MODEL, ORACLE

HEADS, DIM = 4, 128


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _mixer_inputs(tokens: int, heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    weights = (1 + 0.1 * _normal(1, DIM), 1 + 0.1 * _normal(2, DIM), 1 + 0.1 * _normal(3, heads * DIM))
    state = torch.randn(heads, DIM, DIM, generator=torch.Generator().manual_seed(4))
    return (_normal(0, tokens, 4 * heads * DIM), *weights, torch.arange(tokens) + 5000, state)


def test_slopes_of_the_released_head_count() -> None:
    expected = torch.tensor([2.0 ** (-(h + 1) / 4) for h in range(32)], dtype=torch.float64)
    torch.testing.assert_close(slopes(32), expected, rtol=0, atol=0)
    assert slopes(32)[0].item() == pytest.approx(0.8408964, abs=1e-7)
    assert slopes(32)[31].item() == 0.00390625


def test_slopes_of_other_head_counts() -> None:
    assert slopes(8).tolist() == [2.0 ** -(h + 1) for h in range(8)]
    assert slopes(6).tolist() == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    assert slopes(1).tolist() == [2.0**-8]
    assert [slopes(n).numel() for n in range(1, 40)] == list(range(1, 40))


def test_decays() -> None:
    assert decays(32, MODEL).dtype is torch.float32
    assert decays(32, MODEL)[[0, 15, 31]].tolist() == pytest.approx([0.431324, 0.939413, 0.996101], abs=5e-7)


def test_a_token_sees_itself_undecayed() -> None:
    q, k, v = (_normal(i, 1, HEADS, DIM) for i in range(3))
    out, state = recurrence(q, k, v, torch.zeros(HEADS, DIM, DIM), ORACLE)
    expected = (q.double() * k.double()).sum(-1, keepdim=True) * v.double() / math.sqrt(DIM)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, k[0].double()[:, :, None] * v[0].double()[:, None, :], rtol=0, atol=0)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("cold", [True, False])
def test_equals_the_closed_form_in_float64(tokens: int, cold: bool) -> None:
    q, k, v = (_normal(i, tokens, HEADS, DIM) for i in range(3))
    state = torch.randn(HEADS, DIM, DIM, generator=torch.Generator().manual_seed(9)) * (not cold)
    out, final = recurrence(q, k, v, state, ORACLE)
    step = torch.arange(tokens, dtype=torch.float64)
    distance = step[:, None] - step[None, :]
    for h in range(HEADS):
        decay = math.exp(-slopes(HEADS)[h].item())
        mask = torch.where(distance >= 0, decay ** distance.clamp(min=0), 0.0)
        scores = q[:, h].double() @ k[:, h].double().T * mask
        carried = decay ** (step + 1.0)[:, None] * (q[:, h].double() @ state[h].double())
        torch.testing.assert_close(out[:, h], (scores @ v[:, h].double() + carried) / math.sqrt(DIM))
        weighted = k[:, h].double() * decay ** (tokens - 1.0 - step)[:, None]
        expected = decay**tokens * state[h].double() + weighted.T @ v[:, h].double()
        torch.testing.assert_close(final[h], expected)


@pytest.mark.parametrize("cuts", [[64], [1, 2, 63, 65], list(range(1, 70))])
@pytest.mark.parametrize("precision", [MODEL, ORACLE])
def test_pieces_and_single_tokens_give_the_same_bits(cuts: list[int], precision: object) -> None:
    tokens = 70
    qkvz, q_norm, k_norm, o_norm, positions, state = _mixer_inputs(tokens)
    whole, final = lightning_mixer(qkvz, q_norm, k_norm, o_norm, positions, state, precision)  # type: ignore[arg-type]
    outs = []
    for begin, end in zip([0, *cuts], [*cuts, tokens], strict=True):
        part = slice(begin, end)
        out, state = lightning_mixer(qkvz[part], q_norm, k_norm, o_norm, positions[part], state, precision)  # type: ignore[arg-type]
        outs.append(out)
    assert torch.equal(torch.cat(outs), whole)
    assert torch.equal(state, final)


def test_batched_sequences_give_the_bits_of_each_alone() -> None:
    qkvz, q_norm, k_norm, o_norm, positions, state = _mixer_inputs(12)
    batch = qkvz.unflatten(0, (3, 4)), positions.unflatten(0, (3, 4)), torch.stack([state, state * 2, state * 0])
    out, final = lightning_mixer(batch[0], q_norm, k_norm, o_norm, batch[1], batch[2], MODEL)
    for b in range(3):
        alone = lightning_mixer(batch[0][b], q_norm, k_norm, o_norm, batch[1][b], batch[2][b], MODEL)
        assert torch.equal(out[b], alone[0]) and torch.equal(final[b], alone[1])


def test_dtypes_and_that_the_state_given_is_kept() -> None:
    qkvz, q_norm, k_norm, o_norm, positions, state = _mixer_inputs(3)
    before = state.clone()
    out, final = lightning_mixer(qkvz, q_norm, k_norm, o_norm, positions, state, MODEL)
    assert out.dtype is torch.bfloat16 and final.dtype is torch.float32
    assert out.shape == (3, HEADS * DIM) and final.shape == state.shape
    assert torch.equal(state, before)
    exact, wide = lightning_mixer(qkvz, q_norm, k_norm, o_norm, positions, state, ORACLE)
    assert exact.dtype is wide.dtype is torch.float64
    assert float((out.double() - exact).norm() / exact.norm()) < 6e-3
    lightning_mixer(qkvz, q_norm, k_norm, o_norm, positions, wide, ORACLE)
    assert torch.equal(wide, lightning_mixer(qkvz, q_norm, k_norm, o_norm, positions, state, ORACLE)[1])


def test_output_norm_runs_over_all_heads_and_the_gate_comes_after_it() -> None:
    qkvz, q_norm, k_norm, o_norm, positions, state = _mixer_inputs(2)
    width = HEADS * DIM
    open_gate = qkvz.clone()
    open_gate[:, 3 * width :] = 30.0  # sigmoid rounds to 1
    out, _ = lightning_mixer(open_gate, q_norm, k_norm, torch.ones_like(o_norm), positions, state, ORACLE)
    torch.testing.assert_close(out.square().mean(-1), torch.ones(2, dtype=torch.float64), rtol=1e-5, atol=0)
    per_head = out.unflatten(-1, (HEADS, DIM)).square().mean(-1)
    assert (per_head - 1).abs().max() > 0.05
    shut = qkvz.clone()
    shut[:, 3 * width :] = 0.0
    half, _ = lightning_mixer(shut, q_norm, k_norm, torch.ones_like(o_norm), positions, state, ORACLE)
    torch.testing.assert_close(half, out / 2, rtol=1e-9, atol=0)


def test_eps_shows_for_inputs_near_zero() -> None:
    qkvz, q_norm, k_norm, o_norm, positions, state = _mixer_inputs(1)
    small = qkvz * 1e-3
    args = (small, q_norm, k_norm, o_norm, positions, state * 0)
    with_eps, without = (lightning_mixer(*args, ORACLE, eps=eps)[0] for eps in (1e-6, 0.0))
    assert float((with_eps - without).norm() / without.norm()) > 0.1
