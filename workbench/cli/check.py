"""`workbench check`: hold variants against the law, and say what is wrong, where, and by how much."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from workbench.command import Command, Key, Reply, Request, count, duration, one_of, op, size, words

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from workbench.contract import Contract, Workload
    from workbench.registry import Entry
    from workbench.worker import Worker


def _run(request: Request) -> Reply:
    import torch
    from rich.table import Table
    from rich.text import Text

    from workbench.contract import contract
    from workbench.errors import UsageError, nearest
    from workbench.gate.mutation import device as device_named
    from workbench.registry import entries

    law = contract(request["op"])
    for regime in request["regime"] or ():
        if regime not in law.regimes:
            raise UsageError(f"{law.name} has no regime {regime!r}; {nearest(regime, law.regimes)}")
    if request["device"] == "cuda" and not torch.cuda.is_available():
        raise UsageError("device=cuda: PyTorch finds no GPU here; `workbench doctor` says what it finds")
    device = device_named(request["device"])
    chosen = _chosen(request, entries(law.name, request["plugin"]), law)
    asked = request["variant"]
    sizes = request.workloads(law)
    table = Table("variant", "workload", "gate", "margin", "cases", "graph", "seconds")
    rows: list[dict[str, Any]] = []
    failures: list[Any] = []
    interrupted = False
    try:
        for row in _rows(request, law, chosen, sizes, device):
            rows.append(row)
            style = {"passed": "green", "failed": "bold red"}.get(row["status"], "yellow")
            told = row["status"] if row["status"] in ("passed", "failed") else f"{row['status']}: {row['reason']}"
            table.add_row(
                row["variant"],
                row["workload"],
                Text(told, style=style),
                "" if row.get("margin") is None else f"{row['margin']:.2f}",
                str(row.get("cases", "")),
                row.get("graph", ""),
                "" if row.get("seconds") is None else f"{row['seconds']:.1f}",
            )
            if row["status"] == "failed":
                failures.append(Text(f"{row['variant']} on {row['workload']}: {row['reason']}", style="red"))
                failures.append(f"  to repeat it: {row['repeat']}")
                failures += [row["traceback"].rstrip()] if row["traceback"] else []
    except KeyboardInterrupt:
        interrupted = True
    # a variant that this machine can't run is no failure, unless it was asked for by name
    wrong = [row for row in rows if row["status"] not in ("passed", "refused", "unavailable")]
    wrong += [row for row in rows if asked and row["status"] in ("refused", "unavailable")]
    if interrupted:
        done = {entry.name for entry in chosen if sum(row["variant"] == entry.name for row in rows) == len(sizes)}
        left = ",".join(entry.name for entry in chosen if entry.name not in done)
        line = shlex.join(["workbench", "check", *(w for w in request.words if not w.startswith("variant="))])
        failures.append(Text(f"interrupted; what is left: {line} variant={left}", style="yellow"))
        return Reply(rows, [*([table] if rows else []), *failures], 130)
    return Reply(rows, [table, *failures], 1 if wrong else 0)


def _chosen(request: Request, found: list[Entry], law: Contract) -> list[Entry]:
    """The variants asked for, else all that have the tunables given. UsageError for a name or value that is wrong."""
    from workbench.errors import UsageError, nearest
    from workbench.registry import tunable

    asked = request["variant"]
    for name in asked or ():
        if name not in [entry.name for entry in found]:
            raise UsageError(f"{law.name} has no variant {name!r}; {nearest(name, [entry.name for entry in found])}")
    chosen = []
    for entry in found:
        named = entry.name in (asked or ())
        if asked and not named:
            continue
        known = entry.variant.tunables if entry.variant else ()
        if not named and not set(request.tunables) <= set(known):
            continue
        if entry.variant is not None:
            for name, value in request.tunables.items():
                tunable(entry.variant, name, value)
        chosen.append(entry)
    if request.tunables and not chosen:
        raise UsageError(f"no variant of {law.name} has all of {', '.join(request.tunables)}")
    return chosen


def _rows(
    request: Request, law: Contract, chosen: list[Entry], sizes: list[Workload], device: torch.device
) -> Iterator[dict[str, Any]]:
    """Every variant on every workload, as each is done."""
    from workbench.worker import Worker

    for entry in chosen:
        with Worker(str(device), timeout=request["timeout"]) as worker:
            for number, workload in enumerate(sizes):
                request.progress.print(f"{entry.name} on {workload.label} …")
                row = _row(request, law, entry, workload, device, worker, edges=number == 0)
                yield row
                if row["status"] in ("crashed", "timed_out"):  # the worker died; the next sizes would do the same
                    break


def _row(
    request: Request,
    law: Contract,
    entry: Entry,
    workload: Workload,
    device: torch.device,
    worker: Worker,
    *,
    edges: bool,
) -> dict[str, Any]:
    """One variant on one workload, in a process of its own: `status`, and what the gate said."""
    from workbench.gate.result import Failure as Found
    from workbench.gate.result import Kind
    from workbench.record import Failure
    from workbench.registry import refusal
    from workbench.worker import run_gate

    row: dict[str, Any] = {"op": law.name, "variant": entry.name, "workload": workload.label, "traceback": None}
    if entry.variant is None:
        return row | {"status": "unavailable", "reason": entry.reason}
    reason = refusal(entry.variant, workload, device)
    if reason is not None:
        return row | {"status": "refused", "reason": reason}
    one = request["seed"] is not None
    seeds = [request["seed"]] if one else list(range(request["seeds"]))
    try:
        result = run_gate(
            entry.name,
            workload,
            device=str(device),
            seeds=seeds,
            regimes=list(dict.fromkeys(request["regime"])) if request["regime"] else None,
            parameters=request.tunables,
            plugins=request["plugin"],
            timeout=request["timeout"],
            worker=worker,
            # a single seed or regime is a case to repeat: nothing else is run then
            edges=edges and not one and request["regime"] is None,
        )
    except Failure as ended:
        return row | {"status": ended.status.value, "reason": ended.reason, "traceback": ended.detail or None}
    row |= {key: result[key] for key in ("margin", "cases", "graph", "seconds", "skipped", "failure")}
    if result["passed"]:
        return row | {"status": "passed", "reason": None}
    data = {key: value for key, value in result["failure"].items() if key not in ("sentence", "kind")}
    failure = Found(kind=Kind(result["failure"]["kind"]), **{**data, "index": tuple(data["index"])})
    extra = [f"plugin={','.join(request['plugin'])}"] if request["plugin"] else []
    extra += [f"{name}={value}" for name, value in request.tunables.items()]
    extra += [f"device={request['device']}"] if request["device"] else []
    return row | {
        "status": "failed",
        "reason": f"{failure.case}: {failure.sentence}",
        "repeat": failure.command(law.name, entry.name, " ".join(extra)),
        "traceback": failure.traceback,
    }


COMMAND = Command(
    name="check",
    summary="Gate an op's variants: is what they compute right, in every regime and at every edge.",
    keys=(
        Key("op", op, "the op", required=True),
        Key("variant", words, "variants to check: a,b (default: all that run here)"),
        Key("seeds", count, "how many seeds for each workload and regime", default=3),
        Key("seed", size, "one seed alone; edge workloads are left out, as with regime="),
        Key("regime", words, "kinds of input to draw: a,b (default: all of the contract)"),
        Key("plugin", words, "files of variants of your own, a.py,b.py", default=()),
        Key("device", one_of(("cuda", "cpu")), "cuda or cpu (default: the GPU if there is one)"),
        Key("timeout", duration, "how long one variant may take on one workload", default=600.0),
    ),
    run=_run,
    examples=(
        "workbench check op=lightning_decode",
        "workbench check op=lightning_decode variant=eager batch=3 context=63 regime=tiny seed=5",
        "workbench check op=lightning_decode plugin=mine.py variant=mine seeds=200",
    ),
    axes=True,
    tunables=True,
    description=(
        "Each variant runs in a process of its own on the workloads asked for (preset=, axes; default smoke) and on "
        "the contract's edge workloads. Exit code 1 if one fails. `workbench selftest` says what the gate is worth."
    ),
)
