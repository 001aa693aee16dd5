"""Rotary position embedding (Su et al. 2021), half-split, as the lightning layers use it."""

from __future__ import annotations

import torch
from torch import Tensor

from .numerics import Precision, bf16, f32


def frequencies(dim: int, theta: float, device: torch.device | str = "cpu") -> Tensor:
    """Angle per position of each pair, `theta^(−2j/dim)`: float32 [dim/2].

    The power is rounded to float32 and so is its reciprocal, which is how the release builds its table.
    """
    exponent = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
    power = torch.pow(torch.tensor(theta, dtype=torch.float64, device=device), exponent).to(torch.float32)
    return (1.0 / power.double()).to(torch.float32)


def angles(positions: Tensor, dim: int, theta: float) -> Tensor:
    """Angles in radians, float32 [*positions.shape, dim/2].

    The product of position and frequency is rounded to float32 once. Past 10^5 that rounding moves the angle by
    more than a bfloat16 step, so it belongs to the model: both evaluations use these float32 angles.
    """
    inverse = frequencies(dim, theta, positions.device)
    return (positions.to(torch.float32).double()[..., None] * inverse.double()).to(torch.float32)


def apply_rope(x: Tensor, positions: Tensor, theta: float, precision: Precision) -> Tensor:
    """Rotate `x` [..., T, H, D] (bfloat16) by the angles of `positions` [..., T]; pairs are (i, i + D/2).

    cos, sin, the two products and their sum are each rounded to float32, the result to bfloat16.
    """
    angle = angles(positions, x.shape[-1], theta).double()[..., None, :]
    cos, sin = f32(torch.cos(angle), precision).double(), f32(torch.sin(angle), precision).double()
    first, second = x.double().chunk(2, dim=-1)
    rotated = torch.cat(
        (
            f32(first * cos, precision).double() - f32(second * sin, precision).double(),
            f32(second * cos, precision).double() + f32(first * sin, precision).double(),
        ),
        dim=-1,
    )
    return bf16(f32(rotated, precision), precision)
