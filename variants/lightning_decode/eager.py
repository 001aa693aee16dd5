"""Batched torch, a handful of operations over all sequences: no kernel of its own, no synchronisation."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from workbench.variant import variant

EPS = 1e-6
THETA = 10000.0


@functools.cache
def _tables(heads: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Frequencies of the rotation [dim/2] and decays of the heads [heads, 1, 1], float32 on the device."""
    power = (THETA ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)).float()
    below = 1 << (heads.bit_length() - 1)
    exponents = [(h + 1) / below for h in range(below)] + [(2 * h + 1) / (2 * below) for h in range(heads - below)]
    slopes = torch.tensor([2.0 ** (-8.0 * e) for e in exponents], dtype=torch.float64)
    return (1.0 / power).to(device), torch.exp(-slopes).float().to(device)[:, None, None]


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(torch.bfloat16) * weight


@variant()
def eager(
    qkvz: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    o_norm: Tensor,
    positions: Tensor,
    slots: Tensor,
    state: Tensor,
    out: Tensor,
) -> None:
    """Gather the states, advance them together, put them back.

    A padded row repeats the first live one and so writes the same bits to the same place; that needs no
    synchronisation and no shape that depends on data. With no live row the old contents are written back.
    """
    dim = q_norm.numel()
    heads = o_norm.numel() // dim
    frequencies, decays = _tables(heads, dim, qkvz.device)
    live = slots >= 0
    first = live.int().argmax()
    rows = torch.where(live, torch.arange(slots.numel(), device=slots.device), first)
    owned = slots[rows].clamp(min=0).long()

    q, k, v, z = qkvz[rows].unflatten(-1, (4, heads, dim)).unbind(1)
    angle = positions[rows].float()[:, None] * frequencies
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    lower, upper = _norm(torch.stack((q, k)), torch.stack((q_norm, k_norm))[:, None, None]).float().chunk(2, -1)
    q, k = torch.cat((lower * cos - upper * sin, upper * cos + lower * sin), -1).to(torch.bfloat16).float()

    old = state[owned]
    new = (old * decays).addcmul_(k[..., None], v.float()[..., None, :])
    read = ((q * dim**-0.5)[..., None, :] @ new).to(torch.bfloat16).view(-1, heads * dim)
    gated = _norm(read, o_norm) * torch.sigmoid(z.float()).to(torch.bfloat16).view(-1, heads * dim)

    some = live.any()
    state[owned] = torch.where(some, new, old)
    out[rows] = torch.where(some, gated, out[rows])
