"""What a measurement can say: a frozen record that refuses nonsense, and the closed lists of its words."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Any


class Status(str, enum.Enum):
    """How an attempt to gate or time a variant ended."""

    OK = "ok"
    UNAVAILABLE = "unavailable"  # can't be loaded, or can't run on this machine
    REFUSED = "refused"  # by its own word not on this workload, or not with these parameters
    DID_NOT_BUILD = "did_not_build"  # a compiler gave up
    FAILED_GATE = "failed_gate"  # wrong, before or while it was timed
    RAISED = "raised"  # an ordinary exception
    CRASHED = "crashed"  # its process died
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    CUDA_ERROR = "cuda_error"  # the device's context is lost
    BELOW_LIMIT = "below_limit"  # faster than the machine can be
    FORGED = "forged"  # its samples contradict the parent's clock
    REFERENCE_BROKE = "reference_broke"  # our own fault, not the variant's
    INTERRUPTED = "interrupted"


class Verdict(str, enum.Enum):
    """One rival against another."""

    FASTER = "FASTER"
    SLOWER = "SLOWER"
    SAME = "SAME"
    UNDECIDED = "UNDECIDED"


class Mode(str, enum.Enum):
    """How the calls were timed; see `workbench/timing/protocol.py`."""

    GRAPH = "graph"
    EAGER = "eager"
    CPU = "cpu"
    INTERPRETED = "interpreted"


class Failure(Exception):
    """An attempt ended otherwise than `ok`; `detail` is what helps to find out why (traceback, output's tail)."""

    def __init__(self, status: Status, reason: str, detail: str = "") -> None:
        """See the class."""
        super().__init__(f"{status.value}: {reason}")
        self.status = status
        self.reason = reason
        self.detail = detail


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One variant on one workload: figures with their spread, or the reason why there are none.

    `label` names the rival in its race (the variant's name, with parameters or a number if it raced itself).
    Times are in µs or ms as their names say; `None` means not measured. `latency_us` is the median of the
    rounds' medians, `latency_low_us` and `latency_high_us` its 95 % interval. `ratio` is this rival's time over
    that of `versus` with its interval. `rounds_us` are the raw samples, one tuple a round, in the race's order,
    `seeds` the rounds' seeds. `conditions` are clocks, power, temperature and the like, a record a block.

    Raises ValueError where the fields contradict each other: figures without a passed gate or in a failure, a failure
    without a reason, a time that is not positive, an interval that does not hold its figure.
    """

    op: str
    variant: str
    label: str
    origin: str
    axes: Mapping[str, Any]
    preset: str
    parameters: Mapping[str, Any]
    source_hash: str | None
    status: Status
    reason: str | None
    protocol: int
    fingerprint: Mapping[str, Any]
    fingerprint_key: str
    gate: str | None = None
    gate_passed: bool = False
    mode: Mode | None = None
    latency_us: float | None = None
    latency_low_us: float | None = None
    latency_high_us: float | None = None
    warm_us: float | None = None
    launch_us: float | None = None
    call_us: float | None = None
    prepare_ms: float | None = None
    first_call_ms: float | None = None
    limit_us: float | None = None
    share_of_limit: float | None = None
    rank: int | None = None
    verdict: Verdict | None = None
    versus: str | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    sets: int | None = None
    set_bytes: int | None = None
    rounds_us: tuple[tuple[float, ...], ...] = ()
    seeds: tuple[int, ...] = ()
    conditions: tuple[Mapping[str, Any], ...] = ()
    note: str | None = None
    detail: str | None = None

    def __post_init__(self) -> None:
        """Refuse nonsense."""
        failed = self.status is not Status.OK
        if failed and not self.reason:
            raise ValueError(f"status {self.status.value} needs a reason")
        if failed and self.latency_us is not None:
            raise ValueError(f"status {self.status.value} can't carry a latency")
        if not failed and self.latency_us is None:
            raise ValueError("status ok needs a latency")
        if self.latency_us is not None and not (self.gate_passed and self.gate):
            raise ValueError("a latency needs a passed gate")
        if self.rounds_us and self.mode is None:
            raise ValueError("samples need a mode")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.endswith(("_us", "_ms")) and isinstance(value, (int, float)):
                allows_zero = field.name in ("prepare_ms", "first_call_ms", "limit_us")
                if not math.isfinite(value) or value < 0 or (value == 0 and not allows_zero):
                    raise ValueError(f"{field.name}={value} is no time")
        for name in ("latency", "ratio"):
            suffix = "_us" if name == "latency" else ""
            value, low, high = (getattr(self, f"{name}{part}{suffix}") for part in ("", "_low", "_high"))
            if (low is None) != (high is None) or (low is not None and value is None):
                raise ValueError(f"{name}: half an interval")
            if value is not None and low is not None and not low <= value <= high:
                raise ValueError(f"{name}: {value} lies outside its interval {low} … {high}")
        if self.share_of_limit is not None and self.limit_us is None:
            raise ValueError("a share of the limit needs a limit")
        if self.verdict is not None and self.latency_us is None:
            raise ValueError("a verdict needs a latency")

    @property
    def workload(self) -> str:
        """The workload as a user types it."""
        from workbench.contract import format_size

        return " ".join(f"{name}={format_size(value)}" for name, value in self.axes.items())

    def to_json(self) -> dict[str, Any]:
        """The record as JSON-able data; words as texts."""
        data = dataclasses.asdict(self)
        for name, value in data.items():
            if isinstance(value, enum.Enum):
                data[name] = value.value
        data["rounds_us"] = [list(samples) for samples in self.rounds_us]
        data["seeds"] = list(self.seeds)
        data["conditions"] = [dict(condition) for condition in self.conditions]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurement:
        """The record that `to_json` wrote; fields it does not know are an error (TypeError)."""
        fields = dict(data)
        fields["status"] = Status(fields["status"])
        fields["mode"] = Mode(fields["mode"]) if fields.get("mode") else None
        fields["verdict"] = Verdict(fields["verdict"]) if fields.get("verdict") else None
        fields["rounds_us"] = tuple(tuple(samples) for samples in fields.get("rounds_us", ()))
        fields["seeds"] = tuple(fields.get("seeds", ()))
        fields["conditions"] = tuple(fields.get("conditions", ()))
        return cls(**fields)
