"""Inputs and the law's answers, each computed once a process: the selftest asks for them again and again."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from workbench.contract import Contract, Expected, Tolerance, Workload
from workbench.gate import mutation
from workbench.gate.arena import bits, size_in_bytes, walk

LIMIT = 1 << 30
"""Bytes kept of each of the two; a single entry above a quarter of it is not kept."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of inputs: what `make_inputs` needs."""

    workload: Workload
    regime: str
    seed: int

    @property
    def label(self) -> str:
        """As a user types it."""
        return f"{self.workload.label} regime={self.regime} seed={self.seed}"


class ReferenceBroke(Exception):
    """The contract's inputs or the law itself failed; no variant is to blame. The cause is chained."""


class Answers:
    """Inputs and expectations of cases on one device, the most recent kept.

    Inputs handed out are shared and must not be written.
    """

    def __init__(self, contract: Contract, device: torch.device) -> None:
        """See the class."""
        self.contract, self.device = contract, device
        self._inputs: OrderedDict[Any, tuple[int, Any]] = OrderedDict()
        self._expected: OrderedDict[Any, tuple[int, Any]] = OrderedDict()

    def inputs(self, case: Case) -> dict[str, Any]:
        """The arguments of `case`."""

        def make() -> dict[str, Any]:
            try:
                return self.contract.make_inputs(case.workload, case.seed, case.regime, self.device)
            except Exception as error:
                raise ReferenceBroke(f"make_inputs failed for {case.label}: {error}") from error

        return _kept(self._inputs, case, make, size_in_bytes)

    def expected(self, case: Case) -> tuple[dict[str, Expected], dict[str, Expected]]:
        """The law's answers for `case`, in the model's roundings and in float64.

        The second is empty for a contract no output of which needs it. Raises ReferenceBroke.
        """
        return _kept(self._expected, case, lambda: self.evaluate(self.inputs(case), case.label), _answer_bytes)

    def evaluate(self, args: Mapping[str, Any], label: str) -> tuple[dict[str, Expected], dict[str, Expected]]:
        """The law's answers for any arguments; see `expected`."""
        law = mutation.law()
        small = size_in_bytes(args) < 1 << 26
        before = {path: bits(t).clone() for path, t in walk(dict(args))} if small else {}
        needs_oracle = any(
            o.tolerance in (Tolerance.ORACLE, Tolerance.SELECTION) for o in self.contract.outputs.values()
        )
        try:
            with torch.no_grad():
                model = self.contract.reference(law, args, law.numerics.MODEL)
                oracle = self.contract.reference(law, args, law.numerics.ORACLE) if needs_oracle else {}
        except Exception as error:
            raise ReferenceBroke(f"the reference failed for {label}: {type(error).__name__}: {error}") from error
        missing = set(self.contract.outputs) - set(model)
        if missing:
            raise ReferenceBroke(f"the reference says nothing of {', '.join(sorted(missing))}")
        for path, tensor in walk(dict(args)):
            if path in before and not torch.equal(bits(tensor), before[path]):
                raise ReferenceBroke(f"the reference wrote to its argument {path} for {label}")
        return model, oracle


def _kept(
    store: OrderedDict[Any, tuple[int, Any]], key: Any, make: Callable[[], Any], weigh: Callable[[Any], int]
) -> Any:
    if key in store:
        store.move_to_end(key)
        return store[key][1]
    value = make()
    size = weigh(value)
    if size <= LIMIT // 4:
        store[key] = size, value
        while sum(item[0] for item in store.values()) > LIMIT:
            store.popitem(last=False)
    return value


def _answer_bytes(answers: tuple[dict[str, Expected], dict[str, Expected]]) -> int:
    return sum(
        t.numel() * t.element_size()
        for side in answers
        for expected in side.values()
        for t in [
            expected.value,
            *([expected.touched] if expected.touched is not None else []),
            *expected.facts.values(),
        ]
    )
