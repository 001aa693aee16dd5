"""Linear layers and the MLP: roundings where the model puts them, bits that do not depend on the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from reference import formats, mlp
from reference.numerics import MODEL, ORACLE
from reference.random import normal


def draw(key: int, *shape: int, scale: float = 1.0) -> Tensor:
    return normal(key, shape, scale=scale)


def test_mlp_rounds_where_the_model_does() -> None:
    x, gate_up, down = draw(1, 7, 64), draw(2, 192, 64, scale=0.125), draw(3, 64, 96, scale=0.1)
    gate = (x.double() @ gate_up[:96].double().T).to(torch.bfloat16)
    up = (x.double() @ gate_up[96:].double().T).to(torch.bfloat16)
    # torch's bfloat16 SiLU and product compute in float32 and round once each, as the released model's do
    inner = functional.silu(gate) * up
    expected = (inner.double() @ down.double().T).to(torch.bfloat16)
    got = mlp.mlp(x, gate_up, down, MODEL)
    assert got.dtype is torch.bfloat16 and got.equal(expected)


def test_oracle_does_not_round() -> None:
    x, gate_up, down = draw(1, 7, 64), draw(2, 192, 64, scale=0.125), draw(3, 64, 96, scale=0.1)
    both = x.double() @ gate_up.double().T
    expected = (functional.silu(both[:, :96]) * both[:, 96:]) @ down.double().T
    torch.testing.assert_close(mlp.mlp(x, gate_up, down, ORACLE), expected, rtol=1e-12, atol=1e-12)


def test_saturated_gates_stay_finite() -> None:
    gate = torch.tensor([-3e38, -800.0, 800.0, 3e38], dtype=torch.bfloat16)
    out = mlp.silu_times(gate, torch.ones_like(gate), MODEL)
    assert out.tolist() == [0.0, 0.0, 800.0, float(gate[3])]


@pytest.mark.parametrize("format", formats.FORMATS)
def test_rows_do_not_depend_on_their_company(format: str) -> None:
    x = draw(1, 65, 256)
    gate_up = formats.quantise(format, draw(2, 512, 256, scale=0.06))
    down = formats.quantise(format, draw(3, 256, 256, scale=0.06))
    whole = mlp.mlp(x, gate_up, down, MODEL)
    for rows in (1, 2, 3, 8, 63, 64):
        assert mlp.mlp(x[-rows:], gate_up, down, MODEL).equal(whole[-rows:])


@pytest.mark.parametrize("format", formats.FORMATS)
def test_a_format_means_its_dequantised_weights(format: str) -> None:
    x, w = draw(1, 5, 256), draw(2, 130, 256, scale=0.06)
    weight = formats.quantise(format, w)
    assert mlp.linear(x, weight, MODEL).equal(mlp.linear(x, weight.dequantise(), MODEL))
    exact = mlp.linear(x, weight, ORACLE)
    torch.testing.assert_close(exact, x.double() @ weight.dequantise(ORACLE).T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("format", ["fp8_row", "fp8_block"])
def test_activations_are_quantised_by_the_token(format: str) -> None:
    x, w = draw(1, 5, 256), draw(2, 128, 256, scale=0.06)
    x[2] *= 100
    plain, quantised = formats.quantise(format, w), formats.quantise(format, w, "fp8")
    exact, got = mlp.linear(x, plain, ORACLE), mlp.linear(x, quantised, ORACLE)
    error = (got - exact).norm(dim=1) / exact.norm(dim=1)
    assert bool((error > 0.005).all()) and bool((error < 0.05).all())
    assert mlp.linear(x[1:2], quantised, MODEL).equal(mlp.linear(x, quantised, MODEL)[1:2])
