"""torch.compile of the eager form, fused by the compiler.

It keeps fused values in float32 and drops casts to bfloat16 and back, so the roundings are done on the bits, where
it cannot see through them. The new residual comes back as a tensor and is copied into its place: with both
results written in place the C++ backend of torch 2.13 fails to compile (KeyError in its scheduler).
"""

from __future__ import annotations

import functools
import shutil
import types
from collections.abc import Callable

import torch
from torch import Tensor

from workbench.contract import Workload
from workbench.variant import variant

EPS = 1e-6
RELEASED = 4096


def _rounded(x: Tensor) -> Tensor:
    """Float32 rounded to bfloat16, to nearest and ties to even, still as float32."""
    bits = x.view(torch.int32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).view(torch.float32)


def _fused(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float) -> Tensor:
    wide = _rounded(residual.float() + _rounded(branch.float() * scale))
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    out.copy_((_rounded(wide * inverse) * weight.float()).to(torch.bfloat16))
    return wide.to(torch.bfloat16)


@functools.cache
def _compiled(fixed: bool) -> Callable[..., Tensor]:
    """One graph for all sizes, or (`fixed`) for rows of the released width, whose reduction then stays in registers.

    Each has a code object of its own, since the compiler's cache and its limit belong to the code object.
    """
    code = _fused.__code__.replace(co_name="_fused_released" if fixed else "_fused_any")
    function = types.FunctionType(code, _fused.__globals__)
    return torch.compile(function, dynamic=None if fixed else True, fullgraph=True)


def _supports(workload: Workload) -> str | None:
    """Refuse where the compiler's own backend has no compiler: C++ without a GPU."""
    if torch.cuda.is_available() or any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        return None
    return "torch.compile needs a C++ compiler on the CPU (c++, g++ or clang++)"


@variant(supports=_supports)
def compiled(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float) -> None:
    """Run the compiled form; on a CPU one graph serves all sizes, since compiling there takes longer than running."""
    run = _compiled(branch.is_cuda and branch.shape[1] == RELEASED)
    residual.copy_(run(branch, residual, weight, out, scale))
