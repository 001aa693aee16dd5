"""What the gate says: the closed list of failures, and the record of one check."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any


class Kind(enum.Enum):
    """Why a variant failed its gate; a closed list, stored by value."""

    RAISED = "raised"
    REBOUND = "argument rebound"
    INPUT_MUTATED = "input mutated"
    OUT_OF_BOUNDS = "written out of bounds"
    UNWRITTEN = "not written"
    PADDING_TOUCHED = "padding touched"
    NOT_FINITE = "not finite"
    WRONG_VALUES = "wrong values"
    WRONG_SELECTION = "wrong selection"
    WRONG_TOKEN = "wrong token"
    STALE = "stale output"
    NOT_REPEATABLE = "differs between runs"
    DEPENDS_ON_ADDRESS = "depends on addresses"
    LATE_WRITE = "written after return"
    THREAD_LEFT = "thread left running"
    WRONG_STREAM = "work left on another stream"
    GRAPH_DIFFERS = "differs under graph replay"
    CALLS_REFERENCE = "calls the reference"
    TAMPERED = "gate tampered with"
    REFERENCE_BROKE = "reference broke"


VALUE_KINDS = frozenset({Kind.UNWRITTEN, Kind.NOT_FINITE, Kind.WRONG_VALUES, Kind.WRONG_SELECTION, Kind.WRONG_TOKEN})
"""Kinds that say an output's values are wrong."""
STALE_KINDS = frozenset({Kind.WRONG_VALUES, Kind.WRONG_SELECTION, Kind.WRONG_TOKEN})
"""Those among them that may turn out to be the output of the call before."""

Number = float | int | str
"""A value as shown: what is not finite is a word, so that the record is valid JSON."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """The first thing found wrong.

    `output` is the argument concerned ("" if none), `index` the place in it. `error` and `allowed` are in the
    unit that `detail` states; `share` is the share of elements (or rows, for choices) that are wrong.
    `workload` is the label a user types. `traceback` is set for RAISED and REFERENCE_BROKE.
    """

    kind: Kind
    detail: str
    output: str = ""
    index: tuple[int, ...] = ()
    got: Number | None = None
    expected: Number | None = None
    error: float | None = None
    allowed: float | None = None
    share: float | None = None
    regime: str = ""
    seed: int | None = None
    workload: str = ""
    traceback: str | None = None

    @property
    def sentence(self) -> str:
        """What, where, and by how much, on one line."""
        place = self.output + (f"[{', '.join(map(str, self.index))}]" if self.index else "")
        text = f"{self.kind.value}{f' in {place}' if place else ''}: {self.detail}"
        if self.got is not None:
            text += f"; got {self.got}, expected {self.expected}"
        if self.error is not None and self.allowed is not None:
            text += f"; error {self.error:.3g}, allowed {self.allowed:.3g}"
        if self.share is not None:
            text += f"; {self.share:.2%} wrong"
        return text

    def command(self, op: str, variant: str, extra: str = "") -> str:
        """The one line that repeats this case and nothing else; `extra` is appended (plugin=…)."""
        words = ["workbench check", f"op={op}", f"variant={variant}", self.case, extra]
        return " ".join(word for word in words if word)

    @property
    def case(self) -> str:
        """Workload, regime and seed as a user types them, as far as the failure belongs to one."""
        words = [self.workload]
        words += [f"regime={self.regime}"] if self.regime else []
        words += [f"seed={self.seed}"] if self.seed is not None else []
        return " ".join(word for word in words if word)


@dataclasses.dataclass(frozen=True)
class GateResult:
    """Outcome of one check: passed exactly if there is no failure.

    `margin` is the worst error over the allowed one in all cases (below 1 when passed; None if nothing was
    judged). `cases` counts the inputs judged, `skipped` lists edge workloads the variant refuses, with its
    reason. `graph` says what became of CUDA-graph capture ("same bits", "not capturable: …", or "not tried: …").
    """

    op: str
    variant: str
    workload: str
    failure: Failure | None
    margin: float | None
    cases: int
    graph: str
    seconds: float
    skipped: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True if nothing was found wrong."""
        return self.failure is None

    def to_json(self) -> dict[str, Any]:
        """This record as JSON-able data."""
        data = dataclasses.asdict(self)
        data["passed"] = self.passed
        if self.failure is not None:
            data["failure"]["kind"] = self.failure.kind.value
            data["failure"]["sentence"] = self.failure.sentence
        return data
