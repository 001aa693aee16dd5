"""torch.compile of the batched form: the compiler decides what is fused, and may keep wider what the casts round.

The compiled graph returns the new states and outputs; two plain writes put them in their places.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

from workbench.contract import Workload
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


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(torch.bfloat16).float()


def _advance(
    qkvz: Tensor,
    old: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    o_norm: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    decays: Tensor,
) -> tuple[Tensor, Tensor]:
    """New states [rows, heads, dim, dim] and outputs [rows, heads·dim] of rows gathered before."""
    heads, dim = decays.shape[0], q_norm.shape[0]
    q, k, v, z = qkvz.view(-1, 4, heads, dim).unbind(1)
    angle = positions.float()[:, None] * frequencies
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    q = _rotate(_norm(q, q_norm), cos, sin) * dim**-0.5
    k = _rotate(_norm(k, k_norm), cos, sin)
    new = old * decays + k[..., None] * v.float()[..., None, :]
    read = (q[..., None] * new).sum(-2).to(torch.bfloat16).view(-1, heads * dim)
    return new, _norm(read, o_norm) * torch.sigmoid(z.float()).to(torch.bfloat16).reshape(-1, heads * dim)


def _step(
    advance: Callable[..., tuple[Tensor, Tensor]],
    least: int,
    qkvz: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    o_norm: Tensor,
    positions: Tensor,
    slots: Tensor,
    state: Tensor,
    out: Tensor,
    frequencies: Tensor,
    decays: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """New states and outputs, and the slots and rows they belong to, at least `least` of them.

    A padded row repeats the first live one, so that it writes the same bits to the same place.
    """
    batch = slots.shape[0]
    live = slots >= 0
    rows = torch.where(live, torch.arange(batch, device=slots.device), live.int().argmax())
    if batch < least:
        rows = rows.repeat(least)
    owned = slots[rows].clamp(min=0).long()
    old = state[owned]
    new, gated = advance(qkvz[rows], old, q_norm, k_norm, o_norm, positions[rows], frequencies, decays)
    some = live.any()
    return torch.where(some, new, old), torch.where(some, gated, out[rows]), owned, rows


@functools.cache
def _compiled(device: str) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The step for a kind of device: on a GPU compiled whole, for each size; on a CPU its arithmetic, for all sizes.

    A CPU takes half a minute to compile what it then runs in a millisecond; with rows gathered before and never
    fewer than two, one graph serves every batch and layout.
    """
    # Past the default of 8 sizes the compiler refuses; a sweep over batches, strided and not, needs more.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 128)
    if device == "cuda":
        # Inductor would time a few launch shapes in the first call and keep the winner: two compilations of the
        # same source differed by 11 % (H200, batch 8), so that no two races agreed.
        fixed: dict[str, Any] = {"triton.autotune_pointwise": False}
        return torch.compile(functools.partial(_step, _advance, 1), dynamic=False, fullgraph=True, options=fixed)
    return functools.partial(_step, torch.compile(_advance, dynamic=True, fullgraph=True), 2)


def _supports(workload: Workload) -> str | None:
    """Refuse where the compiler's own backend has no compiler: C++ without a GPU."""
    if torch.cuda.is_available() or any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        return None
    return "torch.compile needs a C++ compiler on the CPU (c++, g++ or clang++)"


@variant(supports=_supports)
def compiled(
    qkvz: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    o_norm: Tensor,
    positions: Tensor,
    slots: Tensor,
    state: Tensor,
    out: Tensor,
) -> None:
    """Run the compiled step, then put states and outputs in their places."""
    dim = q_norm.numel()
    tables = _tables(o_norm.numel() // dim, dim, qkvz.device)
    step = _compiled(qkvz.device.type)
    states, outputs, owned, rows = step(qkvz, q_norm, k_norm, o_norm, positions, slots, state, out, *tables)
    state[owned] = states
    out[rows] = outputs
