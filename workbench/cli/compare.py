"""`workbench compare A B`: two runs, or two commits, rival by rival."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from workbench.command import Command, Key, Reply, Request, op
from workbench.errors import UsageError

if TYPE_CHECKING:
    from workbench.store import Row, Store


def _run(request: Request) -> Reply:
    from rich.table import Table
    from rich.text import Text

    from workbench.differences import differences
    from workbench.store import Store
    from workbench.tables import COLOURS, spread
    from workbench.timing.protocol import SETTINGS
    from workbench.timing.stats import round_medians, unpaired

    with Store(request["store"], create=False) as store:
        before = _side(store, request["a"], request["op"])
        after = _side(store, request["b"], request["op"])
    table = Table("op", "workload", "rival", request["a"], request["b"], "verdict of the second", title_justify="left")
    data: list[dict[str, Any]] = []
    for key in [*before, *(key for key in after if key not in before)]:
        row: dict[str, Any] = dict(zip(("op", "workload", "label"), key))
        first, second = before.get(key), after.get(key)
        if first is None or second is None:
            row["missing"] = request["a"] if first is None else request["b"]
            said = Text(f"not measured in {row['missing']}", style="dim")
        else:
            ours, theirs = second.measurement, first.measurement
            row |= {"a": first["id"], "b": second["id"], "a_us": theirs.latency_us, "b_us": ours.latency_us}
            forbidding = [found for found in differences(ours, theirs) if found.decides]
            if forbidding:
                row["not_comparable"] = [f"{found.group} ({found.what})" for found in forbidding]
                said = Text(f"not comparable: {', '.join(row['not_comparable'])}", style="yellow")
            else:
                assert ours.mode is not None
                medians = round_medians(ours.rounds_us), round_medians(theirs.rounds_us)
                found = unpaired(*medians, SETTINGS[ours.mode.value])
                row["comparison"] = found
                ratio = spread(found.ratio.low, found.ratio.value, found.ratio.high)
                said = Text(f"{found.verdict.value} {ratio}", style=COLOURS[found.verdict])
        data.append(row)
        table.add_row(*key, _figure(first), _figure(second), said)
    return Reply({"a": request["a"], "b": request["b"], "rows": data}, [table])


def _side(store: Store, name: str, op_name: str | None) -> dict[tuple[str, str, str], Row]:
    """The latest figure of each rival on each workload, of a run (`r3`) or a commit (the start of its name)."""
    if re.fullmatch(r"r\d+", name):
        store.get(name)
        rows = store.measurements(run=name)
    else:
        rows = [row for row in store.measurements() if (row["revision"] or "").startswith(name)]
        if not rows:
            known = sorted({row["revision"] for row in store.measurements() if row["revision"]})
            listed = f"it has {', '.join(known[-6:])}" if known else "it has no commits"
            raise UsageError(f"{name!r} is neither a run (r3) nor a commit in {store.shown}; {listed}")
    timed = (row for row in rows if row["latency_us"] is not None and op_name in (None, row["op"]))
    found = {(row["op"], row["workload"], row["label"]): row for row in timed}
    if not found:
        raise UsageError(f"{name} has no figures{f' of {op_name}' if op_name else ''}")
    return found


def _figure(row: Row | None) -> str:
    from workbench.tables import spread

    if row is None:
        return "–"
    record = row.measurement
    return f"{spread(record.latency_low_us, record.latency_us, record.latency_high_us)} {row['id']}"


COMMAND = Command(
    name="compare",
    summary="Compare two runs (r3 r5) or two commits, rival by rival, with intervals and verdicts.",
    keys=(
        Key("a", str, "a run (r3) or a commit", required=True),
        Key("b", str, "another", required=True),
        Key("op", op, "only this op"),
        Key("store", str, "database URL or path (default: $WORKBENCH_STORE, else .workbench/store.db)"),
    ),
    run=_run,
    examples=("workbench compare r3 r5", "workbench compare 1a2b3c4 9f8e7d6 op=lightning_decode"),
    positional=("a", "b"),
    description="Only figures of the same machine, versions and protocol are compared; of others it says what differs.",
)
