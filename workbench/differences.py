"""What differs between two measurements, before anyone argues about their figures."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from workbench.record import Measurement


@dataclasses.dataclass(frozen=True)
class Difference:
    """One thing that is not the same; `decides` says that it forbids a comparison."""

    group: str
    what: str
    ours: Any
    theirs: Any
    decides: bool


def differences(
    ours: Measurement, theirs: Measurement, revisions: tuple[str | None, str | None] = (None, None)
) -> list[Difference]:
    """All differences, those that forbid a comparison first: what was measured, machine, protocol; then the rest.

    Clocks, power, temperature and load are medians over the blocks; they count as different beyond 2 %.
    """
    found = list(_pairs(ours, theirs, revisions))
    return sorted(found, key=lambda difference: not difference.decides)


def _pairs(ours: Measurement, theirs: Measurement, revisions: tuple[str | None, str | None]) -> Iterator[Difference]:
    def unequal(group: str, what: str, a: Any, b: Any, decides: bool = False) -> Iterator[Difference]:
        if a != b:
            yield Difference(group, what, a, b, decides)

    yield from unequal("task", "op", ours.op, theirs.op, True)
    for name in sorted({*ours.axes, *theirs.axes}):
        yield from unequal("task", name, ours.axes.get(name), theirs.axes.get(name), True)
    yield from unequal("protocol", "version", ours.protocol, theirs.protocol, True)
    a, b = flat(ours.fingerprint), flat(theirs.fingerprint)
    for name in sorted({*a, *b} - {"protocol"}):
        yield from unequal("machine", name, a.get(name), b.get(name), True)
    yield from unequal("way of timing", "mode", _value(ours.mode), _value(theirs.mode), True)
    yield from unequal("variant", "name", ours.variant, theirs.variant)
    yield from unequal("variant", "source hash", ours.source_hash, theirs.source_hash)
    yield from unequal("variant", "commit", *revisions)
    for name in sorted({*ours.parameters, *theirs.parameters}):
        yield from unequal("variant", name, ours.parameters.get(name), theirs.parameters.get(name))
    yield from unequal("cache state", "working sets", ours.sets, theirs.sets)
    yield from unequal("cache state", "bytes a set", ours.set_bytes, theirs.set_bytes)
    yield from unequal("status", "status", ours.status.value, theirs.status.value)
    a, b = conditions(ours), conditions(theirs)
    for name in sorted({*a, *b}):
        x, y = a.get(name), b.get(name)
        if isinstance(x, (int, float)) and isinstance(y, (int, float)) and abs(x - y) <= 0.02 * max(abs(x), abs(y)):
            continue
        yield from unequal("conditions", name, x, y)


def conditions(record: Measurement) -> dict[str, Any]:
    """Median of each condition over the blocks; throttle reasons as the set of all."""
    names = {name for condition in record.conditions for name in condition}
    found: dict[str, Any] = {}
    for name in sorted(names):
        values = [c[name] for c in record.conditions if c.get(name) is not None]
        if name == "throttled":
            found[name] = ", ".join(sorted({reason for value in values for reason in value})) or "no"
        elif values:
            found[name] = statistics.median(values)
    return found


def flat(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested facts by dotted name."""
    found: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _value(word: Any) -> Any:
    return None if word is None else word.value
