"""What an op promises: the types that `workbench/ops/<op>.py` fills in, and how an op is found by name."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from workbench.errors import UsageError, nearest

AxisValue = int | str


class Tolerance(enum.Enum):
    """How an output is judged (the rules are in `workbench/gate/judge.py`)."""

    BITWISE = "bitwise"
    ORACLE = "oracle"
    SELECTION = "selection"
    TOKENS = "tokens"


@dataclasses.dataclass(frozen=True)
class Axis:
    """One dimension of an op's workload that a user may set, as in `batch=8`.

    `choices` lists the words of a non-numeric axis; a numeric one has `low` and `high` (inclusive).
    """

    default: AxisValue
    doc: str
    low: int = 1
    high: int = 1 << 21
    choices: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Workload:
    """One concrete size of an op: a value for every axis of its contract."""

    op: str
    axes: tuple[tuple[str, AxisValue], ...]
    preset: str = "custom"

    def __getitem__(self, axis: str) -> Any:
        """Value of `axis`; KeyError if the op has none of that name."""
        return dict(self.axes)[axis]

    @property
    def label(self) -> str:
        """The workload as a user types it, `batch=8 context=64k`."""
        return " ".join(f"{name}={format_size(value)}" for name, value in self.axes)

    def replace(self, **axes: AxisValue) -> Workload:
        """Return this workload with other values of the named axes."""
        return Workload(self.op, tuple((name, axes.get(name, value)) for name, value in self.axes), "custom")


def format_size(value: AxisValue) -> str:
    """Write 65536 as `64k` and 1048576 as `1M`; other values as they are."""
    if isinstance(value, int):
        for unit, name in ((1 << 20, "M"), (1 << 10, "k")):
            if value >= unit and value % unit == 0:
                return f"{value // unit}{name}"
    return str(value)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What any implementation of a workload must spend.

    `flops` counts two per multiply-add of the matrix products; `bytes_read` and `bytes_written` count each
    operand once through device memory. `rate` names the measured ceiling the FLOPs are held against.
    """

    flops: float
    bytes_read: int
    bytes_written: int
    rate: str = "bf16"


@dataclasses.dataclass(frozen=True)
class Output:
    """One tensor a variant writes.

    `tolerance`: how it is judged. `inout`: it carries contents in (a state, a cache) and what the law does not
    touch must keep its bits; otherwise it arrives poisoned. `row_dims`: how many trailing dimensions form
    the row over which ORACLE takes its norms. `multiple`: ORACLE only, the allowed multiple of the
    reference's own error over the whole tensor (a row may have twice that). `floor`: ORACLE only, the relative
    error that is allowed in any case, about the rounding of the output's own dtype.
    """

    tolerance: Tolerance
    inout: bool = False
    row_dims: int = 1
    multiple: float = 2.0
    floor: float = 2.0**-9


@dataclasses.dataclass(frozen=True)
class Expected:
    """What the reference says of one output.

    `value` has the output's full shape (for ORACLE precision in float64). `touched` is a bool tensor over the
    output's leading dimensions (None: everything): what is False must keep the bits it had before the call.
    `facts` carries what a tolerance class needs beyond the value:
    SELECTION: `scores` [rows..., blocks] (free blocks' scores, +inf where forced, −inf where not selectable)
    and `count` [rows...] (how many blocks must be chosen). Which blocks are forced, and what counts as one step of
    bfloat16, is read from the model's scores; the oracle's, if given, decide where rounding moved a score.
    TOKENS: `perturbed` [batch, vocab] (what is maximised, −inf where excluded for certain) and
    `slack` [batch] (how far below the best a token may lie; 0, as for greedy rows: only `value` is right).
    """

    value: Tensor
    touched: Tensor | None = None
    facts: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """The reference with one rule bent: `old` is replaced by `new` in `reference/<file>`.

    `rule` says in words what is bent; `caught_by` names the regime that ought to catch it. With `allowed`
    the law permits the change (any choice among equal scores is right), so the gate must let it pass.
    """

    name: str
    rule: str
    file: str
    old: str
    new: str
    caught_by: str = "ordinary"
    allowed: bool = False


@dataclasses.dataclass(frozen=True)
class Contract:
    """An op's contract; see the design's "An op's contract".

    `signature` is a stub whose parameters are the op's arguments in call order, typed with jaxtyping, and whose
    docstring says what is computed and what may be mutated. `make_inputs(workload, seed, regime, device)`
    returns every argument by name, outputs included (their contents do not matter). `reference(law, args,
    precision)` evaluates the law: `law` is the reference package (or a mutant of it, so it must be reached
    through this argument alone), and the result is an `Expected` for every output; it must not write to
    `args`. `weights` names the arguments that stay the same from call to call. `presets` maps a preset's
    name to its workloads. `regimes` lists the kinds of input the gate draws, `ordinary` first.
    `parts` names the ops that a composed op consists of. `gate_workloads` are the extra sizes at which the
    gate checks edges, beside the workload asked for, small enough for any machine.
    """

    name: str
    summary: str
    signature: Callable[..., None]
    axes: Mapping[str, Axis]
    outputs: Mapping[str, Output]
    make_inputs: Callable[[Workload, int, str, torch.device], dict[str, Any]]
    reference: Callable[[ModuleType, Mapping[str, Any], Any], dict[str, Expected]]
    cost: Callable[[Workload], Cost]
    presets: Mapping[str, tuple[Workload, ...]]
    regimes: tuple[str, ...] = ("ordinary",)
    weights: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    gate_workloads: tuple[Workload, ...] = ()

    def workload(self, preset: str = "custom", **axes: AxisValue) -> Workload:
        """Make a workload from the axes given, the rest at their defaults.

        Raises UsageError for an axis the op does not have or a value outside its range.
        """
        for name, value in axes.items():
            self._check_axis(name, value)
        return Workload(
            self.name, tuple((name, axes.get(name, axis.default)) for name, axis in self.axes.items()), preset
        )

    def _check_axis(self, name: str, value: AxisValue) -> None:
        if name not in self.axes:
            raise UsageError(f"{self.name} has no axis {name!r}; {nearest(name, self.axes)}")
        axis = self.axes[name]
        if axis.choices:
            if value not in axis.choices:
                raise UsageError(f"{name}={value}: {nearest(str(value), axis.choices)}")
        elif not isinstance(value, int) or not axis.low <= value <= axis.high:
            raise UsageError(f"{name}={value} must be a whole number from {axis.low} to {format_size(axis.high)}")


def workloads(op: str, axes: Mapping[str, Axis], preset: str, *sizes: Mapping[str, AxisValue]) -> tuple[Workload, ...]:
    """Workloads of a preset, each from the axes that differ from their defaults."""
    return tuple(Workload(op, tuple((n, s.get(n, a.default)) for n, a in axes.items()), preset) for s in sizes)


def op_names() -> list[str]:
    """Names of all ops, sorted: the files of `workbench/ops/`."""
    import workbench.ops as ops

    return sorted(module.name for module in pkgutil.iter_modules(ops.__path__))


def contract(op: str) -> Contract:
    """The contract of `op`; UsageError with the nearest name if there is none."""
    names = op_names()
    if op not in names:
        raise UsageError(f"there is no op {op!r}; {nearest(op, names)}")
    return importlib.import_module(f"workbench.ops.{op}").CONTRACT


def contracts() -> Iterator[Contract]:
    """All contracts, by name."""
    for name in op_names():
        yield contract(name)


def mutants(op: str) -> Sequence[Mutant]:
    """The mutants of the reference made for `op` (`workbench/mutants/<op>.py`)."""
    return importlib.import_module(f"workbench.mutants.{op}").MUTANTS
