"""Faults of conduct, not of arithmetic: a right answer come by wrongly, or spoilt in one place.

Each wraps an unbent copy of the law, so that nothing but the fault can be found. The gate must name each by one of
the kinds it declares.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from workbench.contract import Contract, Workload
from workbench.gate.arena import bits, layout, walk
from workbench.gate.mutation import answer, law, of_function, write
from workbench.gate.result import VALUE_KINDS, Kind
from workbench.variant import Variant

Answers = dict[str, tuple[Tensor, "Tensor | None"]]


@dataclasses.dataclass(frozen=True)
class Fault:
    """A planted fault.

    `bend(contract, compute, args)` is the call; `compute(args)` asks the law. It returns False where these
    inputs give the fault no place to show. `kinds` are the names under which the gate may report it, `regime`
    the one that it is tried in first, `at` an axis's value that a workload must have (("context", 63)), `cuda`
    whether it needs a GPU, `floats` whether it needs an output that can hold NaN.
    """

    name: str
    rule: str
    kinds: frozenset[Kind]
    bend: Callable[[Contract, Callable[[Mapping[str, Any]], Answers], dict[str, Any]], bool | None]
    regime: str = "ordinary"
    at: tuple[tuple[str, ...], int] | None = None
    cuda: bool = False
    floats: bool = False

    def applies(self, contract: Contract, workload: Workload) -> bool:
        """Whether a workload has the size at which this fault shows."""
        if self.at is None:
            return True
        names, value = self.at
        return any(workload[name] == value for name in names if name in contract.axes)


class Planted:
    """A fault as a variant of a contract; `shown` says whether the last call had a place for it."""

    def __init__(self, contract: Contract, fault: Fault, package: ModuleType) -> None:
        """See the class."""
        self.shown = False

        def function(**args: Any) -> None:
            shown = fault.bend(contract, lambda given: answer(contract, package, given), args)
            self.shown = shown is not False

        self.variant: Variant = of_function(contract, function, fault.name)


def _write_all(args: Mapping[str, Any], answers: Answers) -> None:
    for name, (value, touched) in answers.items():
        write(args[name], value, touched)


def _first(contract: Contract, answers: Answers) -> str:
    """The first output, one that arrives poisoned if there is any."""
    names = [name for name in answers if not contract.outputs[name].inout]
    return next(iter(names or answers))


def _mutates_input(contract: Contract, compute: Any, args: dict[str, Any]) -> bool:
    _write_all(args, compute(args))
    for path, tensor in walk(args):
        if path not in contract.outputs and tensor.numel():
            last = tensor[(-1,) * tensor.ndim]
            bits(last.reshape(1)).bitwise_xor_(1)
            return True
    return False


def _past_end(contract: Contract, compute: Any, args: dict[str, Any]) -> bool:
    _write_all(args, compute(args))
    out = args[_first(contract, compute(args))]
    end = out.storage_offset() + sum((n - 1) * s for n, s in zip(out.shape, out.stride())) + 1
    out.as_strided((out.shape[-1],), (1,), end).zero_()
    return True


def _padded_row(contract: Contract, compute: Any, args: dict[str, Any]) -> bool:
    answers = compute(args)
    _write_all(args, answers)
    for name, (_, touched) in sorted(answers.items(), key=lambda item: contract.outputs[item[0]].inout):
        if touched is not None and bool((~touched).any()):
            args[name][tuple((~touched).nonzero()[0].tolist())] = 0
            return True
    return False


def _last_row(args: dict[str, Any], name: str, touched: Tensor | None) -> Tensor | None:
    """The last row of an output that the law touches, as a view."""
    out = args[name]
    if touched is None:
        return out[-1] if out.ndim > 1 else out[-1:]
    rows = touched.nonzero()
    return out[tuple(rows[-1].tolist())] if len(rows) else None


def _unwritten(contract: Contract, compute: Any, args: dict[str, Any]) -> bool:
    answers = compute(args)
    name = _first(contract, answers)
    row = _last_row(args, name, answers[name][1])
    if row is None:
        return False
    kept = row.clone()
    _write_all(args, answers)
    row.copy_(kept)
    return True


def _nan_row(contract: Contract, compute: Any, args: dict[str, Any]) -> bool:
    answers = compute(args)
    _write_all(args, answers)
    for name in answers:
        row = _last_row(args, name, answers[name][1])
        if row is not None and row.is_floating_point():
            row.fill_(torch.nan)
            return True
    return False


def _spoil(row: Tensor) -> None:
    """Spoil a row by a quarter of its size, or by one where it holds whole numbers."""
    row.copy_(row * 1.25 + 2.0**-100 if row.is_floating_point() else row + 1)


def _spoiled(contract: Contract, compute: Any, args: dict[str, Any]) -> bool:
    answers = compute(args)
    _write_all(args, answers)
    name = _first(contract, answers)
    row = _last_row(args, name, answers[name][1])
    if row is None:
        return False
    _spoil(row)
    return True


class _NotRepeatable:
    """Flips the last bit of one element at every second call, as a race between blocks would."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, contract: Contract, compute: Any, args: dict[str, Any]) -> bool:
        answers = compute(args)
        _write_all(args, answers)
        self.calls += 1
        name = _first(contract, answers)
        row = _last_row(args, name, answers[name][1])
        if row is not None and self.calls % 2:
            element = row.reshape(-1)[:1] if row.ndim else row.reshape(1)
            bits(element).bitwise_xor_(1)
        return row is not None


class _Caches:
    """Keeps its answers under a key and gives them again."""

    def __init__(self, key: Callable[[Mapping[str, Any]], Any]) -> None:
        self.key = key
        self.kept: dict[Any, Answers] = {}

    def __call__(self, contract: Contract, compute: Any, args: dict[str, Any]) -> bool:
        inputs = {name: value for name, value in args.items() if name not in contract.outputs}
        key = self.key(inputs), layout(args)
        if key not in self.kept:
            self.kept[key] = compute(args)
        _write_all(args, self.kept[key])
        return True


def _addresses(inputs: Mapping[str, Any]) -> Any:
    return tuple(tensor.data_ptr() for _, tensor in walk(dict(inputs)))


def _beginnings(inputs: Mapping[str, Any]) -> Any:
    """Shapes, and the first sixteen elements of each input: what a cheap fingerprint would look at."""
    return tuple((t.shape, tuple(bits(t[(0,) * (t.ndim - 1)][:16]).tolist())) for _, t in walk(dict(inputs)) if t.ndim)


def _calls_reference(contract: Contract, compute: Any, args: dict[str, Any]) -> bool:
    expected = contract.reference(law(), args, law().numerics.MODEL)
    _write_all(args, {name: (item.value, item.touched) for name, item in expected.items()})
    return True


def _late(contract: Contract, compute: Any, args: dict[str, Any]) -> bool:
    answers = compute(args)

    def finish() -> None:
        time.sleep(0.01)
        _write_all(args, answers)

    threading.Thread(target=finish, daemon=True).start()
    return True


def _rebinds(contract: Contract, compute: Any, args: dict[str, Any]) -> bool:
    answers = compute(args)
    name = _first(contract, answers)
    args[name].set_(args[name].clone())
    _write_all(args, answers)
    return True


def _other_stream(contract: Contract, compute: Any, args: dict[str, Any]) -> bool:
    answers = compute(args)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        _write_all(args, answers)
    return True


_WRONG = VALUE_KINDS
_KEPT = VALUE_KINDS | {Kind.STALE, Kind.PADDING_TOUCHED}  # an old answer also lies where the old call's rows lay
_LATE = VALUE_KINDS | {Kind.LATE_WRITE, Kind.THREAD_LEFT, Kind.NOT_REPEATABLE}  # which depends on when it wakes
_LENGTHS = ("context", "tokens")


def faults() -> tuple[Fault, ...]:
    """All planted faults, fresh (some remember their calls)."""
    return (
        Fault("mutates_input", "read-only arguments keep their bits", frozenset({Kind.INPUT_MUTATED}), _mutates_input),
        Fault("writes_past_end", "nothing outside an output is written", frozenset({Kind.OUT_OF_BOUNDS}), _past_end),
        Fault("rebinds_output", "outputs are written in place", frozenset({Kind.REBOUND}), _rebinds),
        Fault(
            "writes_padded_row", "padding touches nothing", frozenset({Kind.PADDING_TOUCHED}), _padded_row, "padded"
        ),
        Fault("leaves_row_unwritten", "every row is written", _WRONG, _unwritten),
        Fault("nan_in_a_row", "no NaN where the law has none", frozenset({Kind.NOT_FINITE}), _nan_row, floats=True),
        Fault(
            "not_repeatable", "the same call gives the same bits", _WRONG | {Kind.NOT_REPEATABLE}, _NotRepeatable()
        ),
        Fault(
            "caches_on_address", "new contents at the same addresses, new output", _KEPT,
            _Caches(_addresses),
        ),
        Fault(
            "caches_on_fingerprint", "one element a row changed, new output", _KEPT,
            _Caches(_beginnings),
        ),
        Fault("calls_reference", "the law is not called", frozenset({Kind.CALLS_REFERENCE}), _calls_reference),
        Fault(
            "late_write", "the output is complete at return", _LATE, _late
        ),
        Fault("wrong_at_63", "right one key before a block's edge", _WRONG, _spoiled, at=(_LENGTHS, 63)),
        Fault("wrong_at_8192", "right where sparse begins", _WRONG, _spoiled, at=(_LENGTHS, 8192)),
        Fault(
            "wrong_at_batch_3", "right for a batch that is no power of two", _WRONG, _spoiled,
            at=(("batch", "tokens"), 3),
        ),
        Fault(
            "other_stream", "complete on the caller's stream", _WRONG | {Kind.WRONG_STREAM, Kind.LATE_WRITE},
            _other_stream, cuda=True,
        ),
    )  # fmt: skip
