"""`workbench show`: everything known of one measurement, gate or run, and the line that repeats it."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from workbench.command import Command, Key, Reply, Request

if TYPE_CHECKING:
    from workbench.store import Row, Store


def _run(request: Request) -> Reply:
    from workbench.store import Store

    with Store(request["store"], create=False) as store:
        word, row = store.get(request["id"])
        return {"measurement": _measurement, "gate": _gate, "run": _run_row}[word](store, row)


def _measurement(store: Store, row: Row) -> Reply:
    from workbench.tables import number, repeat_line, spread
    from workbench.timing.stats import round_medians

    record = row.measurement
    repeat = repeat_line(record)
    lines = [f"{row['id']}: {record.op} {record.workload}, {record.label}: {record.status.value}"]
    if record.reason:
        lines.append(f"  {record.reason}")
    if record.latency_us is not None:
        figure = spread(record.latency_low_us, record.latency_us, record.latency_high_us)
        lines.append(f"  {figure} µs a call, {record.mode.value if record.mode else ''}, rank {record.rank}")
        if record.verdict is not None:
            ratio = spread(record.ratio_low, record.ratio, record.ratio_high)
            lines.append(f"  {record.verdict.value} against {record.versus}: {ratio} of its time")
    rest = {
        key: value
        for key, value in record.to_json().items()
        if key not in ("rounds_us", "conditions", "detail", "fingerprint", "seeds", "reason") and value is not None
    }
    rest |= {"run": row["run"], "created": row["created"], "commit": row["revision"], "finished race": row["final"]}
    lines += [f"  {key}: {value}" for key, value in rest.items()]
    lines += [f"  machine.{key}: {value}" for key, value in record.fingerprint.items()]
    lines += [f"  samples (µs, a line a round; {len(record.rounds_us)} rounds):"] if record.rounds_us else []
    for seed, samples, condition, median in zip(
        record.seeds, record.rounds_us, record.conditions, round_medians(record.rounds_us)
    ):
        state = " ".join(f"{key}={value}" for key, value in condition.items() if value not in (None, []))
        shown = " ".join(number(x) for x in samples)
        lines.append(f"    {number(median)}: {shown}  seed={seed} {state}".rstrip())
    lines += [record.detail] if record.detail else []
    lines.append(f"repeat: {repeat}")
    columns = {key: row[key] for key in ("id", "run", "created", "revision", "final")}
    return Reply({**columns, **record.to_json(), "repeat": repeat}, ["\n".join(lines)])


def _gate(store: Store, row: Row) -> Reply:
    variant, *parameters = row["label"].partition("#")[0].split(":")
    failure = row["record"].get("failure") or {}
    words = ["workbench check", f"op={row['op']}", f"variant={variant}", failure.get("workload") or row["workload"]]
    words += [f"regime={failure['regime']}"] if failure.get("regime") else []
    words += [f"seed={failure['seed']}"] if failure.get("seed") is not None else []
    command = shlex.split(store.get(row["run"])[1]["command"])
    words += [*parameters, *(word for word in command if word.startswith(("plugin=", "device=")))]
    repeat = " ".join(words)
    lines = [f"{row['id']}: gate of {row['label']} on {row['op']} {row['workload']}: {row['status']}"]
    lines += [f"  {row['reason']}"] if row["reason"] else []
    lines += [f"  {key}: {row[key]}" for key in ("run", "created", "source_hash")]
    lines += [f"  {key}: {_short(value)}" for key, value in row["record"].items() if key not in ("failure", "detail")]
    lines += [f"  failure.{key}: {_short(value)}" for key, value in failure.items() if value is not None]
    lines += [row["record"]["detail"]] if row["record"].get("detail") else []
    lines.append(f"repeat: {repeat}")
    return Reply({**row, "repeat": repeat}, ["\n".join(lines)])


def _run_row(store: Store, row: Row) -> Reply:
    from workbench.tables import machine_line, spread

    lines = [f"{row['id']}: {row['command']}", f"  {row['status']}, started {row['started']}, ended {row['finished']}"]
    lines += [f"  commit {row['revision']}, sources {row['sources']}, machine {row['fingerprint_key']}"]
    lines += [f"  {machine_line(row['machine'])}"]
    rows = store.measurements(run=row["id"], final=None)
    for found in rows:
        record = found.measurement
        figure = spread(record.latency_low_us, record.latency_us, record.latency_high_us)
        said = f"{figure} µs" if record.latency_us is not None else f"{record.status.value}: {record.reason}"
        lines.append(f"  {found['id']}  {record.workload}  {record.label}  {said}")
    lines.append(f"repeat: {row['command']}")
    data = {**row, "measurements": [found["id"] for found in rows], "repeat": row["command"]}
    return Reply(data, ["\n".join(lines)])


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


COMMAND = Command(
    name="show",
    summary="Tell everything about a measurement (m47), a gate (g12) or a run (r3), and the line that repeats it.",
    keys=(
        Key("id", str, "what to show, as printed by bench", required=True),
        Key("store", str, "database URL or path (default: $WORKBENCH_STORE, else .workbench/store.db)"),
    ),
    run=_run,
    examples=("workbench show m47", "workbench show g12", "workbench show r3 --json"),
    positional=("id",),
)
