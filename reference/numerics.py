"""Where values are rounded: the two evaluations of the same code.

Every function of the reference takes a `Precision`. `MODEL` rounds where the released model
rounds; `ORACLE` computes in float64 and rounds nowhere. Sums are always accumulated in float64 and
rounded once, so that their bits do not depend on how many rows are computed together, on the order
of summation, or on the device. Elementary functions are evaluated in float64 for the same reason:
float32 `exp`, `sin` and `rsqrt` differ between devices in the last bit.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor


class Precision(enum.Enum):
    """Which evaluation: the model's roundings, or float64 without any."""

    MODEL = "model"
    ORACLE = "oracle"


MODEL = Precision.MODEL
ORACLE = Precision.ORACLE


def bf16(x: Tensor, precision: Precision) -> Tensor:
    """Round `x` to bfloat16 (MODEL), or widen it to float64 (ORACLE).

    A float64 value passes through float32 on its way, as torch casts it.
    """
    return x.to(torch.bfloat16) if precision is MODEL else x.double()


def f32(x: Tensor, precision: Precision) -> Tensor:
    """Round `x` to float32 (MODEL), or widen it to float64 (ORACLE)."""
    return x.to(torch.float32) if precision is MODEL else x.double()


def matmul(x: Tensor, weight: Tensor, precision: Precision) -> Tensor:
    """Linear layer `x @ weight.T`: accumulated in float64, rounded once to bfloat16.

    `x` is [..., K], `weight` [N, K], both any float dtype; the result is [..., N].
    """
    return bf16(x.double() @ weight.double().mT, precision)


def mul_bf16(a: Tensor, b: Tensor | float, precision: Precision) -> Tensor:
    """Elementwise product, rounded once to bfloat16; a Python factor is first rounded to float32."""
    if not isinstance(b, Tensor):
        b = torch.tensor(b, dtype=torch.float32 if precision is MODEL else torch.float64, device=a.device)
    return bf16(a.double() * b.double(), precision)


def add_bf16(a: Tensor, b: Tensor, precision: Precision) -> Tensor:
    """Elementwise sum, rounded once to bfloat16."""
    return bf16(a.double() + b.double(), precision)


def sigmoid_bf16(x: Tensor, precision: Precision) -> Tensor:
    """Sigmoid of a bfloat16 tensor, rounded once to bfloat16."""
    return bf16(torch.sigmoid(x.double()), precision)
