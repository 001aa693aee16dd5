"""Variants of `residual_rmsnorm` that go wrong in every way a worker must survive; loaded as a plug-in by tests."""

from __future__ import annotations

import ctypes
import os
import queue
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

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
    """Right, but has the timer that it finds on the stack report other samples."""
    timer = sys._getframe(1).f_locals.get("self")
    if type(timer).__name__ == "Timer" and "block" not in vars(timer):
        honest = timer.block  # type: ignore[union-attr]
        timer.block = lambda count, seed: [0.001 for _ in honest(count, seed)]  # type: ignore[union-attr]
    time.sleep(0.002)
    eager(branch, residual, weight, out, scale)


_owed: dict[int, tuple[Any, ...]] = {}


@variant(op=OP)
def patches(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float) -> None:
    """Does the work when its outputs are copied, through a method that it puts in place of torch's."""
    _owed[out.data_ptr()] = branch, residual, weight, out, scale
    if Tensor.clone.__name__ == "late":
        return
    clone = Tensor.clone

    def late(self: Tensor, **options: Any) -> Tensor:
        while _owed and any("slab" in frame.f_locals for frame in _frames()):
            eager(*_owed.popitem()[1])
        return clone(self, **options)

    Tensor.clone = late  # type: ignore


@variant(op=OP)
def watches(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float) -> None:
    """Leaves a default device, and with it a mode that sees every torch function, in place."""
    eager(branch, residual, weight, out, scale)
    if not torch._C._len_torch_function_stack():
        torch.device(out.device).__enter__()


_later: queue.Queue[tuple[Any, ...]] = queue.Queue()


def _work() -> None:
    while True:
        args = _later.get()
        time.sleep(0.001)
        eager(*args)


@variant(op=OP)
def hands_off(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float) -> None:
    """Returns at once where it is timed; a thread does the work afterwards."""
    if not timed():
        eager(branch, residual, weight, out, scale)
        return
    if not any(thread.name == "later" for thread in threading.enumerate()):
        threading.Thread(target=_work, name="later", daemon=True).start()
    _later.put((branch, residual, weight, out, scale))


def timed() -> bool:
    """Whether the caller is a block of samples: planted faults wait for it."""
    return any(frame.f_code.co_name == "_sample" for frame in _frames())


def _frames() -> Iterator[types.FrameType]:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
