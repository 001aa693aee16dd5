"""Dense products for formats without a kernel of their own: weights dequantised once, at load."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.contract import Workload

_FP8_MAX = 448.0


class Dense(NamedTuple):
    """A weight as a plain matrix [N, K]: bfloat16, or float32 where activations are quantised.

    `group` is how many inputs share a scale where activations are quantised to e4m3fn, 0 where they are not.
    """

    matrix: Tensor
    group: int


def dense(weight: Any) -> Dense:
    """Dequantise a contract's weight, and note how its inputs must be quantised.

    With quantised activations both factors stay exact: rounded to bfloat16 again they would give other codes to what
    the next layer quantises.
    """
    if weight.activations == "bf16":
        return Dense(weight.dequantise(), 0)
    scale = weight.tensors["scale"].float()
    if weight.format == "fp8_block":
        rows, columns = weight.shape
        scale = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return Dense(weight.tensors["weight"].float() * scale, 128 if weight.format == "fp8_block" else weight.shape[1])


def arriving(x: Tensor, group: int) -> Tensor:
    """The e4m3fn image of inputs bfloat16 [M, K], a scale for every `group`: float32 [M, K]."""
    groups = x.float().unflatten(-1, (-1, group))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / _FP8_MAX
    codes = (groups / scale).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2)


def multiply(x: Tensor, matrix: Tensor, group: int) -> Tensor:
    """`x @ matrix.T` in bfloat16 [M, N], the inputs quantised first if there is a group."""
    if not group:
        return torch.mm(x, matrix.T)
    return torch.mm(arriving(x, group), matrix.T).to(torch.bfloat16)


@contextlib.contextmanager
def full_sums() -> Iterator[None]:
    """Have cuBLAS add the parts of a split sum in float32, as contracts ask; by default it may use bfloat16."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        settings.allow_bf16_reduced_precision_reduction = before


class Compiled:
    """A function of tensors through torch.compile, which raises where it would otherwise run uncompiled.

    On a GPU each size is compiled by itself; on a CPU, where a compilation takes seconds, sizes are symbolic.
    """

    MOST = 256
    """Compilations kept at once; torch's own limit of eight is used up by one round of the gate."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._on_gpu = torch.compile(function, dynamic=False, fullgraph=True)
        self._on_cpu = torch.compile(function, dynamic=True, fullgraph=True)
        self._seen: set[tuple[object, ...]] = set()

    def __call__(self, *args: Any) -> Tensor:
        """The function's result; only sizes not seen before pay for lifting torch's limit."""
        call = self._on_gpu if args[0].is_cuda else self._on_cpu
        key = tuple((a.shape, a.stride(), a._base is None) if isinstance(a, Tensor) else a for a in args)
        if key in self._seen:
            return call(*args)
        import torch._dynamo

        with torch._dynamo.config.patch(recompile_limit=self.MOST, accumulated_recompile_limit=4 * self.MOST):
            result = call(*args)
        self._seen.add(key)
        return result


def compiler_missing(workload: Workload) -> str | None:
    """The reason why torch.compile can't work here (on a CPU it needs a C++ compiler), or None."""
    if torch.cuda.is_available() or any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        return None
    return "torch.compile needs a C++ compiler on the CPU (c++, g++ or clang++)"
