"""Copies of the reference with one rule bent, and any such copy as a variant.

A copy is a package of its own (another name, in a temporary folder), so the real law is never patched, and a
copy is not taken for a call into the real one.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import importlib
import itertools
import pkgutil
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from workbench.contract import Contract, Mutant
from workbench.errors import UsageError
from workbench.gate.arena import rebuild
from workbench.variant import Variant

_NUMBER = itertools.count()


def _with_submodules(package: ModuleType) -> ModuleType:
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
    return package


@lru_cache(maxsize=1)
def law() -> ModuleType:
    """The real reference with all its modules imported, as contracts want it."""
    return _with_submodules(importlib.import_module("reference"))


def folder() -> Path:
    """Folder of the real reference."""
    return Path(next(iter(importlib.import_module("reference").__path__))).resolve()


@lru_cache(maxsize=1)
def _root() -> Path:
    """Where copies lie during this process; first on the import path, under names nobody else has."""
    root = tempfile.TemporaryDirectory(prefix="workbench-law-")
    sys.path.insert(0, root.name)
    _root.keep = root  # type: ignore[attr-defined]
    return Path(root.name)


def copied(mutant: Mutant | None = None) -> ModuleType:
    """A copy of the reference, with `mutant`'s snippet replaced, or unchanged.

    Raises UsageError unless the snippet occurs exactly once in the file it names, or if the copy cannot be
    imported. `numerics.Precision` is the real one in every copy, so that the same precision serves all.
    """
    name = f"law_copy_{next(_NUMBER)}_{hashlib.sha256(repr(mutant).encode()).hexdigest()[:8]}"
    target = _root() / name
    shutil.copytree(folder(), target, ignore=shutil.ignore_patterns("__pycache__"))
    if mutant is not None:
        file = target / mutant.file
        if not file.is_file():
            raise UsageError(f"mutant {mutant.name}: reference/{mutant.file} does not exist")
        source = file.read_text()
        found = source.count(mutant.old)
        if found != 1 or mutant.old == mutant.new:
            fault = "is replaced by itself" if found == 1 else f"occurs {found} times, must occur once"
            raise UsageError(f"mutant {mutant.name}: {mutant.old!r} in reference/{mutant.file} {fault}")
        file.write_text(source.replace(mutant.old, mutant.new))
    importlib.invalidate_caches()
    try:
        package = importlib.import_module(name)
        real = importlib.import_module("reference.numerics")
        numerics = importlib.import_module(f"{name}.numerics")
        for word in ("Precision", "MODEL", "ORACLE"):
            setattr(numerics, word, getattr(real, word))
        return _with_submodules(package)
    except Exception as error:
        raise UsageError(f"mutant {mutant.name if mutant else 'none'} cannot be imported: {error}") from error


def translate(value: Any, package: ModuleType) -> Any:
    """An argument with every dataclass or enum of the real reference turned into the copy's own (a weight)."""
    kind = type(value)
    if kind.__module__.startswith("reference.") and kind.__module__ != "reference.numerics":
        twin = getattr(importlib.import_module(package.__name__ + kind.__module__[len("reference") :]), kind.__name__)
        if isinstance(value, enum.Enum):
            return twin[value.name]
        if dataclasses.is_dataclass(value):
            made = object.__new__(twin)
            for field in dataclasses.fields(value):
                object.__setattr__(made, field.name, translate(getattr(value, field.name), package))
            return made
    if isinstance(value, Mapping):
        return {key: translate(item, package) for key, item in value.items()}
    return value


def answer(contract: Contract, package: ModuleType, args: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor | None]]:
    """What a copy of the law answers: for each output its value and the mask of what it touches.

    The copy gets its own clones, so that it may be given the variant's memory.
    """
    clones: dict[int, Tensor] = {}

    def clone(tensor: Tensor) -> Tensor:
        return clones.setdefault(id(tensor), tensor.clone())

    own = {name: translate(rebuild(value, clone), package) for name, value in args.items()}
    expected = contract.reference(package, own, law().numerics.MODEL)
    return {name: (item.value, item.touched) for name, item in expected.items()}


def write(out: Tensor, value: Tensor, touched: Tensor | None) -> None:
    """Write what the law touches of `value` into an output, and nothing else."""
    value = value.to(out.device, out.dtype)
    if touched is None:
        out.copy_(value)
    else:
        rows = touched.to(out.device).nonzero(as_tuple=True)
        out[rows] = value[rows]


def as_variant(contract: Contract, package: ModuleType, name: str) -> Variant:
    """A copy of the law as a variant that writes its answers into the outputs."""

    def function(**args: Any) -> None:
        for output, (value, touched) in answer(contract, package, args).items():
            write(args[output], value, touched)

    return of_function(contract, function, name)


def of_function(contract: Contract, function: Callable[..., None], name: str) -> Variant:
    """A plain function as a variant of `contract`, for tests of the gate."""
    return Variant(contract.name, name, function, origin="selftest")


def device(name: str | torch.device | None) -> torch.device:
    """The device named, or the GPU if there is one."""
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
