"""flash-linear-attention's fused recurrence with head norms, rotation, output norm and gate around it in torch.

The library advances states of the shape [sequences, heads, 128, 128] that lie together, so they are gathered from
their slots before and scattered back after: 4 MiB more a sequence than the op needs.
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


@variant(requires=("fla", "triton"), arch=">=sm_80", runs_on=("cuda",))
def fla_recurrent(
    qkvz: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    o_norm: Tensor,
    positions: Tensor,
    slots: Tensor,
    state: Tensor,
    out: Tensor,
) -> None:
    """One token a sequence through `fused_recurrent_simple_gla`; a padded row repeats the first live one."""
    from fla.ops.simple_gla import fused_recurrent_simple_gla

    dim = q_norm.numel()
    heads = o_norm.numel() // dim
    frequencies, log_decays = _tables(heads, dim, qkvz.device)
    live = slots >= 0
    rows = torch.where(live, torch.arange(slots.numel(), device=slots.device), live.int().argmax())
    owned = slots[rows].clamp(min=0).long()

    q, k, v, z = qkvz[rows].unflatten(-1, (4, heads, dim)).unbind(1)
    angle = positions[rows].float()[:, None] * frequencies
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second = _norm(torch.stack((q, k)), torch.stack((q_norm, k_norm))[:, None, None]).float().chunk(2, -1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(torch.bfloat16)

    old = state[owned]
    with torch.no_grad():
        read, new = fused_recurrent_simple_gla(
            rotated[0][:, None],
            rotated[1][:, None],
            v[:, None].contiguous(),
            g_gamma=log_decays,
            scale=dim**-0.5,
            initial_state=old,
            output_final_state=True,
        )
    gated = _norm(read[:, 0].to(torch.bfloat16).flatten(1), o_norm)
    gated = gated * torch.sigmoid(z.float()).to(torch.bfloat16).flatten(1)

    some = live.any()
    state[owned] = torch.where(some, new, old)
    out[rows] = torch.where(some, gated, out[rows])
