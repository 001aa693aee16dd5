"""`workbench history`: an op's best over time, workload by workload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.command import Command, Key, Reply, Request, flag, op
from workbench.errors import UsageError

if TYPE_CHECKING:
    from workbench.store import Row


def _run(request: Request) -> Reply:
    from rich.table import Table

    from workbench.store import Store
    from workbench.tables import machine_line, share, spread

    with Store(request["store"], create=False) as store:
        rows = [row for row in store.measurements(op=request["op"]) if row["latency_us"] is not None]
        if not rows:
            raise UsageError(f"{store.shown} has no figures of {request['op']}; `workbench bench op={request['op']}`")
    text: list[Any] = []
    data: list[dict[str, Any]] = []
    for (key, workload), group in _groups(rows, request).items():
        table = Table("when", "commit", "variant", "µs, median [95 %]", "of limit", "gain", "id", title_justify="left")
        table.title = f"{request['op']}  {workload}  on {machine_line(group[0].measurement.fingerprint)}"
        best: float | None = None
        bar: float | None = None  # the lower end of the best's interval: a new best must lie below it as a whole
        for row in _leaders(group):
            record = row.measurement
            assert record.latency_us is not None and record.latency_low_us is not None
            assert record.latency_high_us is not None
            better = bar is None or record.latency_high_us < bar
            if not better and not request["all"]:
                continue
            gain = "" if best is None else f"{best / record.latency_us:.3g}×"
            if better:
                best, bar = record.latency_us, record.latency_low_us
            figure = spread(record.latency_low_us, record.latency_us, record.latency_high_us)
            table.add_row(
                row["created"],
                row["revision"] or "–",
                record.label,
                figure,
                share(record.share_of_limit),
                gain,
                row["id"],
            )
            data.append(
                {
                    "machine": key,
                    "workload": workload,
                    "id": row["id"],
                    "created": row["created"],
                    "commit": row["revision"],
                    "variant": record.label,
                    "latency_us": record.latency_us,
                    "share_of_limit": record.share_of_limit,
                    "best": better,
                }
            )
        text += [table, ""]
    return Reply(data, text)


def _groups(rows: list[Row], request: Request) -> dict[tuple[str, str], list[Row]]:
    """Rows by machine and workload; only the workloads asked for, if axes or a preset are given."""
    from workbench.contract import contract

    wanted = None
    if request.axes or request["preset"]:
        wanted = {workload.label for workload in request.workloads(contract(request["op"]))}
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if wanted is None or row["workload"] in wanted:
            found.setdefault((row["fingerprint_key"], row["workload"]), []).append(row)
    if not found:
        raise UsageError(f"no figures of {request['op']} on the workloads asked for")
    return found


def _leaders(group: list[Row]) -> list[Row]:
    """The fastest of each run, in the order of the runs."""
    fastest: dict[str, Row] = {}
    for row in group:
        if row["run"] not in fastest or row["latency_us"] < fastest[row["run"]]["latency_us"]:
            fastest[row["run"]] = row
    return list(fastest.values())


COMMAND = Command(
    name="history",
    summary="Show an op's best over time: when, by which commit and variant, and what it gained.",
    keys=(
        Key("op", op, "the op", required=True),
        Key("all", flag, "yes: each run's fastest, not only new bests", default=False),
        Key("store", str, "database URL or path (default: $WORKBENCH_STORE, else .workbench/store.db)"),
    ),
    run=_run,
    examples=("workbench history op=lightning_decode", "workbench history op=lightning_decode batch=8 all=yes"),
    axes=True,
)
