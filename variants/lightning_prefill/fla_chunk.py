"""flash-linear-attention's chunked recurrence with norms, rotation and gate around it in torch.

Ragged batches go through in one call by their cumulative lengths; the library works out its chunks on the host,
so the call cannot be captured in a graph. Its operands are bfloat16, its states between chunks as well.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from workbench.variant import variant

EPS = 1e-6
THETA = 10000.0


@functools.cache
def _tables(heads: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Frequencies of the rotation [dim/2] and logarithms of the heads' decays [heads], float32 on the device."""
    power = (THETA ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)).float()
    below = 1 << (heads.bit_length() - 1)
    exponents = [(h + 1) / below for h in range(below)] + [(2 * h + 1) / (2 * below) for h in range(heads - below)]
    slopes = torch.tensor([2.0 ** (-8.0 * e) for e in exponents], dtype=torch.float64)
    return (1.0 / power).to(device), (-slopes).float().to(device)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(torch.bfloat16) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(torch.bfloat16)


@variant(requires=("fla", "triton"), arch=">=sm_80", runs_on=("cuda",))
def fla_chunk(
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
    """The rows of the live sequences are packed together and handed to `chunk_simple_gla`."""
    from fla.ops.simple_gla import chunk_simple_gla

    device, dim = qkvz.device, q_norm.numel()
    heads = o_norm.numel() // dim
    bounds, starts, owned = cu_seqlens.tolist(), start.tolist(), slots.tolist()
    live = [b for b in range(len(owned)) if owned[b] >= 0 and bounds[b + 1] > bounds[b]]
    if not live:
        return
    sizes = [bounds[b + 1] - bounds[b] for b in live]
    rows = torch.cat([torch.arange(bounds[b], bounds[b + 1], device=device) for b in live])
    positions = torch.cat([torch.arange(n, device=device) + starts[b] for b, n in zip(live, sizes)])
    packed = torch.tensor([0, *sizes]).cumsum(0)
    places = torch.tensor([owned[b] for b in live], device=device)
    begun = torch.tensor([starts[b] > 0 for b in live], device=device)[:, None, None, None]

    frequencies, log_decays = _tables(heads, dim, device)
    q, k, v, z = qkvz[rows].unflatten(-1, (4, heads, dim)).unbind(1)
    angle = positions.float()[:, None] * frequencies
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    with torch.no_grad():
        read, final = chunk_simple_gla(
            _rotate(_norm(q, q_norm), cos, sin)[None],
            _rotate(_norm(k, k_norm), cos, sin)[None],
            v[None].contiguous(),
            g_gamma=log_decays,
            scale=dim**-0.5,
            initial_state=torch.where(begun, state[places], 0.0),
            output_final_state=True,
            cu_seqlens=packed.to(device),
            cu_seqlens_cpu=packed,
        )
    state[places] = final
    gated = _norm(read[0].to(torch.bfloat16).flatten(1), o_norm)
    out[rows] = gated * torch.sigmoid(z.float()).to(torch.bfloat16).flatten(1)
