"""`workbench doctor`: what is here, how fast it is at best, and what would bring what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.command import Command, Key, Reply, Request, duration, one_of


def _run(request: Request) -> Reply:
    import torch
    from rich.table import Table
    from rich.text import Text

    from workbench.contract import op_names
    from workbench.diagnosis import findings, refused

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = findings()
    table = Table("", "", "found", "for", title="this machine", title_justify="left")
    group = ""
    for finding in found:
        here = Text(finding.found) if finding.found else Text("no", style="yellow")
        table.add_row("" if finding.group == group else finding.group, finding.name, here, finding.use)
        group = finding.group
    ceilings, source = _ceilings(str(device), request)
    rows = refused(device, op_names())
    lacking = [finding for finding in found if finding.found is None and finding.remedy]
    text: list[Any] = [
        table,
        f"ceilings of this machine ({source}): {ceilings['label'] if ceilings else 'unknown'}",
        "",
    ]
    if rows:
        away = Table("op", "variant", "why not", title=f"unavailable on {device.type}", title_justify="left")
        for row in rows:
            away.add_row(row["op"], row["variant"], row["reason"])
        text.append(away)
    if lacking:
        remedies = Table("missing", "the command that brings it", title="what could be had", title_justify="left")
        for finding in lacking:
            remedies.add_row(finding.name, str(finding.remedy))
        text.append(remedies)
    data = {
        "device": device.type,
        "findings": found,
        "ceilings": ceilings,
        "ceilings_source": source,
        "unavailable": rows,
        "remedies": {finding.name: finding.remedy for finding in lacking},
    }
    return Reply(data, text)


def _ceilings(device: str, request: Request) -> tuple[dict[str, Any] | None, str]:
    """Ceilings of this machine, kept or measured now, and where they are from; None with the reason."""
    from workbench import fingerprint
    from workbench.errors import UsageError
    from workbench.record import Failure
    from workbench.store import Store
    from workbench.timing.limits import Ceilings
    from workbench.worker import Worker

    if request["measure"] == "no":
        return None, "not asked for: measure=no"
    try:
        store = Store(request["store"], create=False)
    except UsageError:
        if request["store"] is not None and Path(request["store"]).exists():
            raise
        store = None
    try:
        with Worker(device) as worker:
            worker.ask("hello")
            key = fingerprint.key(worker.hello["machine"])
            kept = store.ceilings(key) if store is not None and request["measure"] == "auto" else None
            if kept is None:
                with request.progress.status("measuring the ceilings of this machine"):
                    measured = worker.ask("ceilings", seconds=request["seconds"])
                if store is not None:
                    store.add_ceilings(key, measured)
    except Failure as failure:
        return None, f"could not be measured: {failure}"
    finally:
        if store is not None:
            store.close()
    data = kept or measured
    return {**data, "label": Ceilings.from_json(data).label}, "from the store" if kept else "measured now"


_WHEN = ("auto", "yes", "no")

COMMAND = Command(
    name="doctor",
    summary="Say what this machine has, its measured ceilings, what is missing, and the command that brings it.",
    keys=(
        Key(
            "measure",
            one_of(_WHEN),
            "measure ceilings: auto (if none are kept), yes, no",
            "auto",
            complete=lambda: _WHEN,
        ),
        Key("seconds", duration, "how long measuring may take", 4.0),
        Key("store", str, "database that keeps ceilings (default: $WORKBENCH_STORE or .workbench/store.db)"),
    ),
    run=_run,
    examples=("workbench doctor", "workbench doctor measure=yes", "workbench doctor measure=no --json"),
)
