"""Linear layers and the SiLU-gated MLP, on dense or quantised weights."""

from __future__ import annotations

import torch
from torch import Tensor

from . import formats
from .numerics import Precision, bf16, matmul, mul_bf16


def linear(x: Tensor, weight: Tensor | formats.Weight, precision: Precision) -> Tensor:
    """`x @ weight.T` for `x` [..., K] and a weight [N, K], dense or in a format: [..., N] bfloat16.

    Accumulated in float64 and rounded once; a quantised weight is dequantised first, and its activations
    are quantised as its format says.
    """
    if isinstance(weight, Tensor):
        return matmul(x, weight, precision)
    return matmul(formats.activations(x, weight), formats.dequantise(weight, precision), precision)


def silu_times(gate: Tensor, up: Tensor, precision: Precision) -> Tensor:
    """`silu(gate)·up`, elementwise: SiLU rounded to bfloat16, then the product rounded to bfloat16."""
    g = gate.double()
    return mul_bf16(bf16(g * torch.sigmoid(g), precision), up, precision)


def mlp(x: Tensor, gate_up: Tensor | formats.Weight, down: Tensor | formats.Weight, precision: Precision) -> Tensor:
    """MLP of a layer: `down(silu(gate(x))·up(x))`, every linear layer's output rounded to bfloat16.

    `x` [..., hidden], `gate_up` [2·intermediate, hidden] with the gate's rows before the up projection's,
    `down` [hidden, intermediate]; the result is [..., hidden].
    """
    gate, up = linear(x, gate_up, precision).chunk(2, -1)
    return linear(silu_times(gate, up, precision), down, precision)
