"""Variants of `residual_rmsnorm` that go wrong in every way a worker must survive; loaded as a plug-in by tests."""

from __future__ import annotations

import ctypes
import os
import sys
import time

import torch
from torch import Tensor

from variants.residual_rmsnorm.eager import eager
from workbench.variant import variant

OP = "residual_rmsnorm"


@variant(op=OP, tunables={"block": (1, 2)})
def good(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float, *, block: int = 1) -> None:
    """Right."""
    eager(branch, residual, weight, out, scale)


@variant(op=OP)
def slow(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float) -> None:
    """Right, and slower."""
    time.sleep(0.005)
    eager(branch, residual, weight, out, scale)


@variant(op=OP)
def exits(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float) -> None:
    """Ends its process."""
    print("about to leave", flush=True)
    os._exit(3)


@variant(op=OP)
def segfaults(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float) -> None:
    """Reads address zero."""
    ctypes.string_at(0)


@variant(op=OP)
def hangs(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float) -> None:
    """Never returns."""
    time.sleep(1000)


@variant(op=OP)
def hungry(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float) -> None:
    """Asks for a pebibyte."""
    torch.empty(1 << 50, dtype=torch.uint8)


@variant(op=OP)
def raises(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float) -> None:
    """Raises."""
    raise ValueError("no such luck")


@variant(op=OP)
def leaves(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float) -> None:
    """Calls sys.exit."""
    sys.exit(0)


class CompilationError(Exception):
    """Named like Triton's."""


@variant(op=OP)
def unbuilt(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float) -> None:
    """Does not compile."""
    raise CompilationError("at 3:7: incompatible types")


@variant(op=OP)
def lost(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float) -> None:
    """Loses the GPU's context."""
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@variant(op=OP)
def wrong(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float) -> None:
    """Answers twice what is right."""
    eager(branch, residual, weight, out, scale)
    out *= 2


@variant(op=OP, requires=("surely_not_installed",))
def lacking(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float) -> None:
    """Lacks a package."""


@variant(op=OP, supports=lambda workload: "needs more tokens" if workload["tokens"] < 1000 else None)
def picky(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float) -> None:
    """Refuses small workloads."""


@variant(op=OP)
def late_crash(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float) -> None:
    """Passes its gate and dies while it is timed."""
    eager(branch, residual, weight, out, scale)
    if timed():
        os._exit(4)


_remembered: dict[int, Tensor] = {}


@variant(op=OP)
def caches(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float) -> None:
    """Answers with what it answered at that address before, once it believes that nobody looks."""
    if timed() and out.data_ptr() in _remembered:
        out.copy_(_remembered[out.data_ptr()])
        return
    eager(branch, residual, weight, out, scale)
    _remembered[out.data_ptr()] = out.clone()


@variant(op=OP)
def forges(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float) -> None:
    """Right, but rewrites the function that takes the samples."""
    from workbench.timing import samples

    honest = samples.Timer.block
    if honest.__name__ == "block":

        def forged(self: samples.Timer, count: int, seed: int) -> list[float]:
            return [0.001 for _ in honest(self, count, seed)]

        samples.Timer.block = forged  # type: ignore[method-assign]
    time.sleep(0.002)
    eager(branch, residual, weight, out, scale)


def timed() -> bool:
    """Whether the caller is a block of samples: planted faults wait for it."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_sample":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
