"""Which variants there are, whether one can run here, and with which parameters.

A variant is found in three places: the folder `variants/<op>/` (one file a variant), the entry-point group
`workbench.variants` of installed packages, and plug-in files named by the user. Its signature is checked
against the contract when it is loaded. What cannot be loaded or cannot run keeps its place in the list with a
reason; nothing is ever replaced by something else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from workbench.contract import Contract, Workload, contract, op_names
from workbench.errors import UsageError, nearest
from workbench.signature import Unfit, check_signature, satisfies
from workbench.variant import Declaration, Variant

GROUP = "workbench.variants"
"""Entry-point group of outside plug-ins; an entry point names a module or a function."""

DISTRIBUTIONS = {
    "fla": "flash-linear-attention",
    "flashinfer": "flashinfer-python",
    "psycopg": "'psycopg[binary]'",
    "pynvml": "nvidia-ml-py",
    "tvm": "apache-tvm-ffi",
}
"""Packages whose name for pip is not the name that is imported."""

_OWN = ("workbench", "variants", "reference")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of the registry: a variant, or the reason why it could not be loaded.

    `origin` is `variants`, `entry point <name>`, or the path of a plug-in.
    """

    op: str
    name: str
    variant: Variant | None
    reason: str | None
    origin: str


def interpret_without_gpu() -> None:
    """Have Triton interpret its kernels on a machine without a GPU; effective only before Triton is imported."""
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def folders() -> list[Path]:
    """The folders that hold `<op>/<variant>.py`: the package `variants`, in a checkout or installed."""
    spec = importlib.util.find_spec("variants")
    return [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []


def files(op: str) -> dict[str, Path]:
    """The files of `variants/<op>/` by the variant's name; those that start with `_` are no variants."""
    found = (path for folder in folders() for path in sorted((folder / op).glob("*.py")))
    return {path.stem: path for path in found if not path.stem.startswith("_")}


def entries(op: str, plugins: Sequence[str] = ()) -> list[Entry]:
    """All variants of `op`, the folder's first, each loaded or with the reason why not.

    `plugins` are paths of Python files. Raises UsageError if there is no such op, a plug-in file is missing
    or does not fit its contract, or two variants have the same name.
    """
    law = contract(op)
    interpret_without_gpu()
    found = [_from_folder(law, name) for name in files(op)]
    return _distinct(found + _from_outside(law, plugins))


def find(op: str, name: str, plugins: Sequence[str] = ()) -> Variant:
    """The variant `name` of `op`; only its own file and the plug-ins are loaded.

    Raises UsageError if there is none of that name (naming the nearest) or it can't be loaded (with the reason).
    """
    law = contract(op)
    interpret_without_gpu()
    inside = [_from_folder(law, name)] if name in files(op) else []
    outside = _from_outside(law, plugins)
    for entry in _distinct(inside + outside):
        if entry.name == name:
            if entry.variant is None:
                raise UsageError(f"variant {name!r} of {op} is unavailable: {entry.reason}")
            return entry.variant
    known = [*files(op), *(entry.name for entry in outside)]
    raise UsageError(f"{op} has no variant {name!r}; {nearest(name, known)}")


def place(variant: Variant, device: torch.device) -> str:
    """Where the variant would run on `device`: `cuda`, `cpu`, or `interpreter` (Triton's, on the CPU)."""
    if device.type == "cuda":
        return "cuda"
    return "interpreter" if "interpreter" in variant.runs_on and "cpu" not in variant.runs_on else "cpu"


def refusal(variant: Variant, workload: Workload | None, device: torch.device) -> str | None:
    """Why the variant can't run on this device (and on this workload, if one is given); None if it can."""
    for package in variant.requires:
        if not _importable(package):
            return missing_package(package)
    where = place(variant, device)
    if where not in variant.runs_on:
        return f"runs on {' and '.join(variant.runs_on)}, not on {where}"
    if "triton" in variant.requires:
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if where == "cuda" and interpreted:
            return "TRITON_INTERPRET=1 is set, so the kernel would be interpreted; unset it"
        if where == "interpreter" and not interpreted:
            return "on the CPU it needs Triton's interpreter; set TRITON_INTERPRET=1"
    if where == "cuda" and variant.arch:
        major, minor = torch.cuda.get_device_capability(device)
        if not satisfies(variant.arch, major * 10 + minor):
            return f"needs {variant.arch}, this GPU is sm_{major}{minor}"
    if workload is not None and variant.supports is not None:
        try:
            return variant.supports(workload)
        except Exception as fault:  # a foreign function may fail in any way; the reason is shown
            return f"its supports() failed: {_one_line(fault)}"
    return None


def parameters(variant: Variant, workload: Workload, given: Mapping[str, Any]) -> dict[str, Any]:
    """A value for every tunable: the one given, else the variant's heuristic, else its default.

    Given values may be texts, as typed. Raises UsageError for an unknown tunable or a value not among its choices.
    """
    result = variant.defaults
    if variant.heuristic is not None:
        chosen = variant.heuristic(workload)
        unknown = sorted(set(chosen) - set(result))
        if unknown:
            raise UsageError(f"{variant.path}: the heuristic sets {unknown[0]!r}; {nearest(unknown[0], result)}")
        result.update(chosen)
    return result | {name: tunable(variant, name, value) for name, value in given.items()}


def tunable(variant: Variant, name: str, value: Any) -> Any:
    """The choice of a tunable that `value`, perhaps a text as typed, stands for. UsageError if there is none."""
    if name not in variant.tunables:
        known = nearest(name, variant.tunables) if variant.tunables else "it has none"
        raise UsageError(f"variant {variant.name!r} of {variant.op} has no tunable {name!r}; {known}")
    choices = {str(choice): choice for choice in variant.tunables[name]}
    if str(value) not in choices:
        raise UsageError(f"{variant.name}:{name}={value}: {nearest(str(value), choices)}")
    return choices[str(value)]


def prepare(variant: Variant, workload: Workload, args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with the weights that the variant repacks replaced by what its `prepare` returns.

    Raises UsageError if it returns anything but weights of the contract.
    """
    result = dict(args)
    if variant.prepare is not None:
        weights = contract(variant.op).weights
        replaced = variant.prepare(workload, **{name: args[name] for name in weights})
        wrong = sorted(set(replaced) - set(weights))
        if wrong:
            raise UsageError(f"{variant.path}: prepare returned {wrong[0]!r}; {nearest(wrong[0], weights)}")
        result.update(replaced)
    return result


def missing_package(package: str) -> str:
    """The reason for a package that is not installed, with the command that installs it."""
    return f"needs the package {package!r}; {install_command(package)}"


def install_command(package: str) -> str:
    """The command that installs the package imported as `package` for this interpreter."""
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    return f"{python} -m pip install {DISTRIBUTIONS.get(package, package)}"


def _variant(function: Callable[..., None], law: Contract, origin: str) -> Variant:
    check_signature(function, law)
    declaration: Declaration = function.workbench_variant  # type: ignore[attr-defined]
    fields = {field.name: getattr(declaration, field.name) for field in dataclasses.fields(declaration)}
    return Variant(op=law.name, name=function.__name__, function=function, origin=origin, **fields)


def _declared(module: ModuleType) -> list[Callable[..., None]]:
    """The variants that a module defines itself, not those it imports."""
    return [
        value
        for value in vars(module).values()
        if callable(value)
        and isinstance(getattr(value, "workbench_variant", None), Declaration)
        and getattr(value, "__module__", None) == module.__name__
    ]


def _from_folder(law: Contract, name: str) -> Entry:
    path = files(law.name)[name]
    shown = f"variants/{law.name}/{path.name}"

    def load() -> Variant:
        functions = _declared(importlib.import_module(f"variants.{law.name}.{name}"))
        names = [function.__name__ for function in functions]
        if names != [name]:
            found = " and ".join(f"{n}()" for n in names) or "none"
            raise Unfit(f"one file holds one variant, named as the file: expected {name}(), found {found}")
        op = getattr(functions[0], "workbench_op", "")
        if op not in ("", law.name):
            raise Unfit(f"{name}() is declared for the op {op!r} but lies in the folder of {law.name!r}")
        return _variant(functions[0], law, "variants")

    return _attempt(load, law.name, name, "variants", shown)


def _attempt(load: Callable[[], Variant], op: str, name: str, origin: str, shown: str) -> Entry:
    """Load a foreign file; whatever it raises becomes the reason of its entry."""
    try:
        return Entry(op, name, load(), None, origin)
    except Unfit as mistake:
        return Entry(op, name, None, f"{shown}: {mistake}", origin)
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.split(".")[0] in _OWN:
            return Entry(op, name, None, f"{shown} does not load: {missing}", origin)
        return Entry(op, name, None, missing_package(missing.name.split(".")[0]), origin)
    except Exception as fault:  # a foreign file may fail in any way; the reason is kept and shown
        return Entry(op, name, None, f"{shown} does not load: {_one_line(fault)}", origin)


def _one_line(fault: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(fault.__traceback__) if not f.filename.startswith("<frozen")]
    inside = frames and not isinstance(fault, SyntaxError)  # which says itself where it is
    where = f" (line {frames[-1].lineno} of {Path(frames[-1].filename).name})" if inside else ""
    text = str(fault).strip().splitlines()
    return f"{type(fault).__name__}: {text[0] if text else ''}{where}"


def _from_outside(law: Contract, plugins: Sequence[str]) -> list[Entry]:
    found = [entry for point in _entry_points() for entry in _from_entry_point(law, point)]
    for path in dict.fromkeys(str(Path(plugin).expanduser().resolve()) for plugin in plugins):
        found += _from_plugin(law, Path(path))
    return found


def _entry_points() -> Iterable[importlib.metadata.EntryPoint]:
    return sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: (point.name, point.value))


def _from_entry_point(law: Contract, point: importlib.metadata.EntryPoint) -> list[Entry]:
    origin = f"entry point {point.name}"
    shown = f"{origin} ({point.value})"
    try:
        target = point.load()
    except Exception as fault:  # its op is unknown, so it is listed, with the reason, under every op

        def fail(fault: Exception = fault) -> Variant:
            raise fault

        return [_attempt(fail, law.name, point.name, origin, shown)]
    functions = _declared(target) if isinstance(target, ModuleType) else [target]
    return _entries_of(functions, law, origin, shown, "")


def _from_plugin(law: Contract, path: Path) -> list[Entry]:
    """Variants of the op in a file the user named; a mistake in it ends the command, for it was asked for."""
    if not path.is_file():
        raise UsageError(f"plugin={path}: there is no such file")
    digest = hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:16]
    name = f"workbench_plugin_{digest}"
    module = sys.modules.get(name)
    if module is None:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise UsageError(f"plugin={path}: not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except ModuleNotFoundError as missing:
            del sys.modules[name]
            package = (missing.name or "").split(".")[0]
            reason = f"{path} does not load: {missing}" if package in ("", *_OWN) else missing_package(package)
            return [Entry(law.name, path.stem, None, reason, str(path))]
        except (Exception, SystemExit) as fault:
            del sys.modules[name]
            raise UsageError(f"plugin={path} does not load: {_one_line(fault)}") from fault
    functions = _declared(module)
    if not functions:
        raise UsageError(f"plugin={path} declares no variant; put @variant(op={law.name!r}) above a function")
    found = _entries_of(functions, law, str(path), str(path), path.parent.name)
    for entry in found:
        if entry.variant is None:
            raise UsageError(f"plugin={entry.reason}")
    return found


def _entries_of(
    functions: Sequence[Callable[..., None]], law: Contract, origin: str, shown: str, folder: str
) -> list[Entry]:
    """Entries for those functions that belong to the op; `folder` names the op where the decorator doesn't."""
    found = []
    for function in functions:
        name = getattr(function, "__name__", repr(function))
        if not isinstance(getattr(function, "workbench_variant", None), Declaration):
            found.append(Entry(law.name, name, None, f"{shown}: {name} lacks the decorator @variant", origin))
            continue
        op = getattr(function, "workbench_op", "") or (folder if folder in op_names() else "")
        if op not in op_names():
            known = nearest(op, op_names())
            mistake = f"@variant(op={op!r}): {known}" if op else f"@variant names no op; say op={law.name!r} in it"
            found.append(Entry(law.name, name, None, f"{shown}: {name}(): {mistake}", origin))
        elif op == law.name:

            def load(function: Callable[..., None] = function) -> Variant:
                return _variant(function, law, origin)

            found.append(_attempt(load, law.name, name, origin, shown))
    return found


def _distinct(found: list[Entry]) -> list[Entry]:
    """The entries as they are; UsageError if two have the same name."""
    seen: dict[str, Entry] = {}
    for entry in found:
        if entry.name in seen:
            raise UsageError(
                f"two variants of {entry.op} are named {entry.name!r}: {_where(seen[entry.name])} and {_where(entry)};"
                " rename one"
            )
        seen[entry.name] = entry
    return found


def _where(entry: Entry) -> str:
    return f"variants/{entry.op}/{entry.name}.py" if entry.origin == "variants" else entry.origin


def _importable(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # a parent is missing, or the module lies about its spec
        return package in sys.modules
