"""What is watched while a variant runs, beside its outputs: the law's functions, threads, streams, graphs."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from workbench.gate import mutation
from workbench.gate.arena import Arena, bits
from workbench.gate.judge import place

SLEEP_CYCLES = 20_000_000
"""Clock cycles (about 10 ms) by which inputs come late on the side stream."""

_FREE = frozenset({"formats", "grids", "layouts", "config", "random"})
"""Modules of the reference a variant may reach: what a weight's format means, sizes, random numbers."""


class CallsReference(Exception):
    """A variant called the law that it is held against; the message names the function."""


def _guarded(path: str) -> str | None:
    """Module of the reference that `path` is, if it is one that variants must not call."""
    root = str(mutation.folder())
    if not path.startswith(root + os.sep):
        return None
    module = path[len(root) + 1 :].rsplit(".", 1)[0].split(os.sep)[0]
    return None if module in _FREE or module == "__init__" else module


@lru_cache(maxsize=1)
def _tripwires() -> tuple[tuple[types.FunctionType, types.CodeType, types.CodeType], ...]:
    """Every function of the law with its code and the code that raises in its place."""
    mutation.law()
    found: dict[int, tuple[types.FunctionType, types.CodeType, types.CodeType]] = {}
    for name, module in list(sys.modules.items()):
        if module is None or not name.startswith("reference."):
            continue
        for value in list(vars(module).values()):
            own_class = inspect.isclass(value) and value.__module__ == name
            for member in list(vars(value).values()) if own_class else [value]:
                function = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
                function = getattr(function, "__wrapped__", function)
                if isinstance(function, types.FunctionType) and not function.__code__.co_freevars:
                    guarded = _guarded(function.__code__.co_filename)
                    if guarded is not None:
                        trip = _tripwire(f"{guarded}.{function.__name__}")
                        found[id(function)] = function, function.__code__, trip
    return tuple(found.values())


def _tripwire(name: str) -> types.CodeType:
    """Code of a function that takes anything and raises CallsReference with `name`."""
    space: dict[str, Any] = {}
    lines = (
        "def trip(*args, **kwargs):",
        " from workbench.gate.watch import CallsReference",
        f" raise CallsReference({name!r})",
    )
    exec(compile("\n".join(lines), "<tripwire of the gate>", "exec"), space)
    return space["trip"].__code__


@contextlib.contextmanager
def law_forbidden() -> Iterator[None]:
    """Within this context any call into the real reference raises CallsReference, on every thread.

    The functions' code is exchanged rather than the modules' names, so a function imported beforehand, or traced
    by a compiler, is caught as well. Copies of the reference are other functions.
    """
    tripwires = _tripwires()
    try:
        for function, _, trip in tripwires:
            function.__code__ = trip
        yield
    finally:
        for function, code, _ in tripwires:
            function.__code__ = code


@contextlib.contextmanager
def profiled(calls: list[str]) -> Iterator[None]:
    """Within this context calls of code from the reference's files are appended to `calls`, on new threads too.

    This sees what `law_forbidden` does not: the reference's files executed under another name.
    """

    def note(frame: types.FrameType, event: str, arg: object) -> None:
        if event == "call" and not calls:
            module = _guarded(frame.f_code.co_filename)
            if module is not None and frame.f_code.co_name != "<module>":
                calls.append(f"{module}.{frame.f_code.co_name}")

    before, before_threads = sys.getprofile(), threading.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
        threading.setprofile(before_threads)


def new_threads(before: set[threading.Thread]) -> list[str]:
    """Names of the threads that are alive now and were not in `before`."""
    return [thread.name for thread in threading.enumerate() if thread not in before and thread.is_alive()]


def side_stream(
    call: Callable[[], None], arena: Arena, first: Mapping[str, Any], second: Mapping[str, Any], device: torch.device
) -> dict[str, Tensor]:
    """Outputs of a call on a stream of its own whose inputs come late, snapshotted on that stream.

    `first` lies in the arena, `second` replaces it on the stream after a sleep: work that a variant puts on the
    default stream, or on one that does not wait, reads `first`; work that the caller's stream does not wait for
    is missing from the snapshot.
    """
    arena.load(first)
    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        arena.bring(second)
        call()
        found = arena.snapshot()
    torch.cuda.synchronize(device)
    return found


def graph_replay(
    call: Callable[[], None], arena: Arena, first: Mapping[str, Any], second: Mapping[str, Any], device: torch.device
) -> dict[str, Tensor] | str:
    """Outputs of a replay on other contents than those it was captured on, or why it could not be captured.

    `first` is in the arena at capture, `second` at replay, at the same addresses.
    """
    arena.load(first)
    torch.cuda.synchronize(device)
    warm = torch.cuda.Stream(device)
    with torch.cuda.stream(warm):
        call()
    torch.cuda.synchronize(device)
    arena.bring(first)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except Exception as error:
        with contextlib.suppress(Exception):
            torch.cuda.synchronize(device)
        return f"not capturable: {_first_line(error)}"
    arena.load(second)
    torch.cuda.synchronize(device)
    graph.replay()
    torch.cuda.synchronize(device)
    return arena.snapshot()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> tuple[str, tuple[int, ...], float] | None:
    """First output whose bits differ between two snapshots: its name, a place, and the share that differs."""
    for name, tensor in one.items():
        wrong = bits(tensor) != bits(other[name])
        if bool(wrong.any()):
            at = int(wrong.reshape(-1).to(torch.uint8).argmax())
            return name, place(at, tensor.shape), float(wrong.double().mean())
    return None
