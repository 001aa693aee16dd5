"""What a variant declares about itself: the decorator, and the record the registry keeps."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workbench.contract import Workload

PLACES = ("cuda", "cpu", "interpreter")
"""Where a variant can run; `interpreter` is Triton's, on a machine without a GPU."""


def _sources(path: Path) -> list[Path]:
    """The file itself, then every file of the package `variants` that it imports, directly or not, sorted."""
    found: set[Path] = set()
    pending = [path]
    while pending:
        for node in ast.walk(ast.parse(pending.pop().read_bytes())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("variants."):
                spec = importlib.util.find_spec(node.module or "")
                if spec is not None and spec.origin and Path(spec.origin) not in {path, *found}:
                    found.add(Path(spec.origin))
                    pending.append(Path(spec.origin))
    return [path, *sorted(found)]


@dataclasses.dataclass(frozen=True)
class Variant:
    """One implementation of one op.

    `function(**args, **parameters)` computes the op in place: every argument of the contract by name, then
    the tunables as keywords. `requires` are importable package names, `arch` a condition on the GPU
    (">=sm_80", "==sm_90"; empty: any), `runs_on` a subset of `PLACES`. `supports(workload)` returns None or
    the reason for a refusal; `heuristic(workload)` the parameters to use when none are given or tuned;
    `prepare(workload, **weights)` runs once and returns replacements for the contract's weight arguments.
    `chained` says that the kernel may start before its predecessor ends (programmatic dependent launch).
    `origin` is where it was found: `variants`, an entry point's name, or a plug-in's path.
    """

    op: str
    name: str
    function: Callable[..., None]
    requires: tuple[str, ...] = ()
    arch: str = ""
    runs_on: tuple[str, ...] = ("cuda", "cpu")
    tunables: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    supports: Callable[[Workload], str | None] | None = None
    heuristic: Callable[[Workload], dict[str, Any]] | None = None
    prepare: Callable[..., dict[str, Any]] | None = None
    chained: bool = False
    origin: str = "variants"

    @property
    def path(self) -> Path:
        """File that defines the variant."""
        return Path(inspect.getfile(inspect.unwrap(self.function)))

    @property
    def source_hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the variant's file and of what it imports from `variants`."""
        digest = hashlib.sha256()
        for path in _sources(self.path):
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]

    @property
    def defaults(self) -> dict[str, Any]:
        """Defaults of the tunables, from the function's signature."""
        parameters = inspect.signature(self.function).parameters
        return {name: parameters[name].default for name in self.tunables}


@dataclasses.dataclass(frozen=True)
class Declaration:
    """What `@variant` attaches to the function; the registry adds the op (the folder) and the origin."""

    requires: tuple[str, ...]
    arch: str
    runs_on: tuple[str, ...]
    tunables: Mapping[str, tuple[Any, ...]]
    supports: Callable[[Workload], str | None] | None
    heuristic: Callable[[Workload], dict[str, Any]] | None
    prepare: Callable[..., dict[str, Any]] | None
    chained: bool


def variant(
    *,
    op: str = "",
    requires: tuple[str, ...] = (),
    arch: str = "",
    runs_on: tuple[str, ...] = ("cuda", "cpu"),
    tunables: Mapping[str, tuple[Any, ...]] | None = None,
    supports: Callable[[Workload], str | None] | None = None,
    heuristic: Callable[[Workload], dict[str, Any]] | None = None,
    prepare: Callable[..., dict[str, Any]] | None = None,
    chained: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare a function as a variant; see `Variant` for the fields.

    `op` is needed only outside `variants/<op>/`, where no folder names it.
    """

    def declare(function: Callable[..., None]) -> Callable[..., None]:
        declaration = Declaration(requires, arch, runs_on, dict(tunables or {}), supports, heuristic, prepare, chained)
        function.workbench_variant = declaration  # type: ignore[attr-defined]
        function.workbench_op = op  # type: ignore[attr-defined]
        return function

    return declare
