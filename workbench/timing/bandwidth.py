"""Triton kernels that do nothing but move memory, for the ceilings of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def read_kernel(source, sums, steps, BLOCK: tl.constexpr):
    """Each program reads `steps` blocks of int32 and stores their sum, so that no load can be left out."""
    program = tl.program_id(0).to(tl.int64)
    offsets = program * steps * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for step in range(steps):
        total += tl.load(source + offsets + step * BLOCK)
    tl.store(sums + program, tl.sum(total, axis=0))


@triton.jit
def copy_kernel(source, target, BLOCK: tl.constexpr):
    """Each program copies one block of int32."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + offsets, tl.load(source + offsets))


def reader(source: torch.Tensor, block: int, steps: int, warps: int) -> Callable[[], Any]:
    """A call that reads all of `source`, int32 of a multiple of block·steps elements."""
    programs = source.numel() // (block * steps)
    sums = torch.empty(programs, dtype=torch.int32, device=source.device)
    return lambda: read_kernel[(programs,)](source, sums, steps, BLOCK=block, num_warps=warps)


def copier(source: torch.Tensor, target: torch.Tensor, block: int, warps: int) -> Callable[[], Any]:
    """A call that copies `source` to `target`, int32 of a multiple of `block` elements."""
    return lambda: copy_kernel[(source.numel() // block,)](source, target, BLOCK=block, num_warps=warps)
