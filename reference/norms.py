"""Root-mean-square norm and the residual addition, with the model's roundings."""

from __future__ import annotations

import torch
from torch import Tensor

from .numerics import Precision, add_bf16, bf16, f32, mul_bf16


def rms_norm(x: Tensor, weight: Tensor, eps: float, precision: Precision) -> Tensor:
    """RMSNorm over the last dimension (Zhang & Sennrich 2019), rounded twice as the release does.

    `x` [..., D] and `weight` [D] are bfloat16; the result has `x`'s shape. Mean square and
    x·rsqrt(mean square + eps) are float32; that is rounded to bfloat16 and then multiplied by the weight.
    """
    mean_square = f32(x.double().square().mean(-1, keepdim=True), precision)
    inverse = f32(torch.rsqrt(mean_square.double() + eps), precision)
    normed = bf16(f32(x.double() * inverse.double(), precision), precision)
    return mul_bf16(normed, weight, precision)


def residual_add(x: Tensor, branch: Tensor, scale: float, precision: Precision) -> Tensor:
    """`x + branch·scale`, both [..., D] bfloat16: the scaled branch is rounded, then the sum."""
    return add_bf16(x, mul_bf16(branch, scale, precision), precision)
