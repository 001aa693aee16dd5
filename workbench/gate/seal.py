"""Whether the functions that the gate and the timing rest on are still those the worker began with.

A variant shares their process. One that puts its own `Tensor.clone` in place could do the work when the gate looks
instead of when it is called; one that replaces the judge needs to do none. So what they use is noted before any
variant is loaded, and looked at again before a result is believed.
"""

from __future__ import annotations

import builtins
import inspect
import json
import secrets
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import torch

from workbench.contract import Contract
from workbench.gate import mutation

_OWN = ("workbench", "reference")
_USERS = ("workbench.gate", "workbench.ops", "workbench.timing", "workbench.worker_process", "reference")
_FOREIGN = (torch, torch.Tensor, torch.cuda, time, threading, json, secrets, builtins)
"""Where the names are looked up that `_USERS` use; a compiler may replace others for reasons of its own."""


class Seal:
    """What was found when it was made, or last `extend`ed; `broken` names the first thing that has changed."""

    def __init__(self) -> None:
        """Note all that is loaded, the law included."""
        self._found: dict[tuple[int, str], tuple[Any, Any, Any]] = {}
        self._known: set[str] = set()
        mutation.law()
        self.extend()

    def extend(self) -> None:
        """Note our modules that were loaded since."""
        new = {name: module for name, module in list(sys.modules.items()) if _own(name) and name not in self._known}
        self._known.update(new)
        used: set[str] = set()
        for module in new.values():
            for owner, name, value in _members(module):
                self._found[id(owner), name] = owner, value, _code(value)
                used.update(_names(_code(value)) if module.__name__.startswith(_USERS) else ())
        for owner in _FOREIGN:
            for name in used:
                value = inspect.getattr_static(owner, name, None)
                if callable(value) or isinstance(value, (staticmethod, classmethod, property)):
                    self._found.setdefault((id(owner), name), (owner, value, _code(value)))

    def broken(self) -> str | None:
        """What is not as it was, in words; None if all is."""
        for (_, name), (owner, value, code) in self._found.items():
            now = inspect.getattr_static(owner, name, None)
            if now is not value or _code(now) is not code:
                return f"{getattr(owner, '__name__', type(owner).__name__)}.{name} is not what it was at the start"
        if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
            return "a mode that sees every torch function was left in place"
        return None


def _own(name: str) -> bool:
    return name.partition(".")[0] in _OWN


def _members(module: types.ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """Functions, classes and modules that a module names, methods of its classes, functions of its contract."""
    for name, value in list(vars(module).items()):
        if callable(value) or isinstance(value, types.ModuleType):
            yield module, name, value
        if inspect.isclass(value) and value.__module__ == module.__name__:
            for member, method in list(vars(value).items()):
                if callable(method) or isinstance(method, (staticmethod, classmethod, property)):
                    yield value, member, method
        if isinstance(value, Contract):
            yield module, name, value
            yield from ((value, field, getattr(value, field)) for field in ("make_inputs", "reference", "cost"))


def _code(value: Any) -> types.CodeType | None:
    function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
    return getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)


def _names(code: types.CodeType | None) -> Iterator[str]:
    """Names of attributes and globals that a function's code uses, functions inside it included."""
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from _names(constant)
