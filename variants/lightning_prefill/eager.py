"""Chunk-wise torch: all chunks of 64 tokens at once, and one step a chunk for the states of all sequences.

Within a chunk the outputs are two matrix products under a triangle of decays; only the states go from chunk to
chunk one after another. Decays are powers of differences of positions, since λ^−64 overflows float32. The chunk's
layout depends on the lengths, so `cu_seqlens`, `start` and `slots` are read on the host: no graph capture.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from workbench.variant import variant

EPS = 1e-6
THETA = 10000.0
CHUNK = 64


@functools.cache
def _frequencies(dim: int, device: torch.device) -> Tensor:
    power = (THETA ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)).float()
    return (1.0 / power).to(device)


@functools.cache
def _decay_powers(heads: int, device: torch.device) -> Tensor:
    """λ^n of each head for n = 0 … CHUNK, float32 [heads, CHUNK + 1]."""
    below = 1 << (heads.bit_length() - 1)
    exponents = [(h + 1) / below for h in range(below)] + [(2 * h + 1) / (2 * below) for h in range(heads - below)]
    slopes = torch.tensor([2.0 ** (-8.0 * e) for e in exponents], dtype=torch.float64)
    return torch.exp(-slopes[:, None] * torch.arange(CHUNK + 1)).float().to(device)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(torch.bfloat16) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(torch.bfloat16).float()


@variant()
def eager(
    qkvz: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    o_norm: Tensor,
    cu_seqlens: Tensor,
    start: Tensor,
    slots: Tensor,
    state: Tensor,
    out: Tensor,
) -> None:
    """Lay the live sequences out in chunks of 64 rows, longest sequence first."""
    device, dim = qkvz.device, q_norm.numel()
    heads = o_norm.numel() // dim
    bounds, starts, owned = cu_seqlens.tolist(), start.tolist(), slots.tolist()
    sizes = [end - begin for begin, end in zip(bounds, bounds[1:])]
    live = sorted((b for b in range(len(sizes)) if owned[b] >= 0 and sizes[b] > 0), key=lambda b: -sizes[b])
    if not live:
        return
    # Chunk c of every sequence that has one lies together, so that a step of the recurrence is one slice.
    steps = [sum(sizes[b] > c * CHUNK for b in live) for c in range(-(-sizes[live[0]] // CHUNK))]
    chunks = [
        (bounds[b] + c * CHUNK, bounds[b + 1], starts[b] + c * CHUNK) for c, n in enumerate(steps) for b in live[:n]
    ]
    first, end, position = torch.tensor(chunks, device=device).unbind(1)
    inside = torch.arange(CHUNK, device=device)
    rows = first[:, None] + inside
    valid = rows < end[:, None]
    rows = torch.where(valid, rows, first[:, None])
    counts = (end - first).clamp(max=CHUNK)

    q, k, v, z = qkvz[rows].unflatten(-1, (4, heads, dim)).unbind(2)
    angle = (position[:, None] + inside).float()[..., None] * _frequencies(dim, device)
    cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]
    keep = valid[:, :, None, None]
    q = _rotate(_norm(q, q_norm), cos, sin).transpose(1, 2) * dim**-0.5  # [chunks, heads, CHUNK, dim], float32
    k = torch.where(keep, _rotate(_norm(k, k_norm), cos, sin), 0.0).transpose(1, 2)
    v = torch.where(keep, v.float(), 0.0).transpose(1, 2)

    powers = _decay_powers(heads, device)
    difference = inside[:, None] - inside[None, :]
    triangle = torch.where(difference >= 0, powers[:, difference.clamp(min=0)], 0.0)
    read = ((q @ k.mT) * triangle) @ v
    carried = q * powers[:, 1:, None]
    left = (counts[:, None] - 1 - inside).clamp(min=0)
    weighted = (k * powers[:, left].transpose(0, 1)[..., None]).mT
    shrink = powers[:, counts].T[..., None, None]

    places = torch.tensor([owned[b] for b in live], device=device)
    begun = torch.tensor([starts[b] > 0 for b in live], device=device)
    current = torch.where(begun[:, None, None, None], state[places], 0.0)
    at = 0
    for n in steps:
        part = slice(at, at + n)
        read[part] += carried[part] @ current[:n]
        current[:n] = current[:n] * shrink[part] + weighted[part] @ v[part]
        at += n
    state[places] = current

    normed = _norm(read.transpose(1, 2)[valid].to(torch.bfloat16).flatten(1), o_norm)
    out[rows[valid]] = normed * torch.sigmoid(z[valid].float()).to(torch.bfloat16).flatten(1)
