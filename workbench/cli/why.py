"""`workbench why A B`: what differs between two measurements, and only then their figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.command import Command, Key, Reply, Request
from workbench.errors import UsageError

if TYPE_CHECKING:
    from workbench.store import Row, Store


def _run(request: Request) -> Reply:
    from rich.table import Table
    from rich.text import Text

    from workbench.differences import differences
    from workbench.store import Store
    from workbench.tables import spread

    with Store(request["store"], create=False) as store:
        first, second = _measurement(store, request["a"]), _measurement(store, request["b"])
    ours, theirs = first.measurement, second.measurement
    found = differences(ours, theirs, (first["revision"], second["revision"]))
    forbidding = [difference for difference in found if difference.decides]
    table = Table("", "what differs", first["id"], second["id"])
    for difference in found:
        colour = "red" if difference.decides else ""
        table.add_row(
            Text(difference.group, style=colour), difference.what, _shown(difference.ours), _shown(difference.theirs)
        )
    text: list[Any] = [table] if found else ["nothing that is recorded differs"]
    if forbidding:
        names = ", ".join(f"{difference.group} ({difference.what})" for difference in forbidding)
        text.append(Text(f"not comparable: they differ in {names}", style="red"))
    comparison = None if forbidding else _compared(first, second)
    for row, record in ((first, ours), (second, theirs)):
        figure = spread(record.latency_low_us, record.latency_us, record.latency_high_us)
        text.append(f"{row['id']}  {record.label}  {record.workload}  {figure} µs ({record.status.value})")
    if comparison is not None:
        text.append(
            f"{first['id']} against {second['id']}: {comparison.verdict.value},"
            f" {spread(comparison.ratio.low, comparison.ratio.value, comparison.ratio.high)} of its time"
        )
    data = {"a": first["id"], "b": second["id"], "comparable": not forbidding, "differences": found}
    return Reply({**data, "comparison": comparison}, text)


def _measurement(store: Store, name: str) -> Row:
    word, row = store.get(name)
    if word != "measurement":
        raise UsageError(f"{name} is a {word}; why compares two measurements (m47), `workbench compare` two runs")
    return row


def _compared(first: Row, second: Row) -> Any:
    """The verdict between two figures: paired where they come from one race, else from both sides resampled."""
    from workbench.timing.protocol import SETTINGS
    from workbench.timing.stats import compare, round_medians, unpaired

    ours, theirs = first.measurement, second.measurement
    if ours.latency_us is None or theirs.latency_us is None or ours.mode is None:
        return None
    settings = SETTINGS[ours.mode.value]
    a, b = round_medians(ours.rounds_us), round_medians(theirs.rounds_us)
    if first["run"] == second["run"] and set(ours.seeds) & set(theirs.seeds):
        both = sorted({*ours.seeds, *theirs.seeds})
        place = {seed: index for index, seed in enumerate(both)}
        return compare(
            {place[seed]: median for seed, median in zip(ours.seeds, a)},
            {place[seed]: median for seed, median in zip(theirs.seeds, b)},
            settings,
        )
    return unpaired(a, b, settings)


def _shown(value: Any) -> str:
    return "–" if value is None else str(value)


COMMAND = Command(
    name="why",
    summary="Say what differs between two measurements (clock, driver, compiler, source, cache state), then compare.",
    keys=(
        Key("a", str, "a measurement", required=True),
        Key("b", str, "another", required=True),
        Key("store", str, "database URL or path (default: $WORKBENCH_STORE, else .workbench/store.db)"),
    ),
    run=_run,
    examples=("workbench why m47 m52",),
    positional=("a", "b"),
)
