"""`workbench variants`: who competes in an op, and who can't here, with the reason."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from workbench.command import Command, Key, Reply, Request, one_of, ops, words

if TYPE_CHECKING:
    import torch

    from workbench.contract import Contract, Workload
    from workbench.registry import Entry


def _run(request: Request) -> Reply:
    import torch
    from rich.table import Table
    from rich.text import Text

    from workbench.contract import contract, op_names
    from workbench.errors import UsageError
    from workbench.registry import entries

    if request["device"] == "cuda" and not torch.cuda.is_available():
        raise UsageError("device=cuda: PyTorch finds no GPU here; `workbench doctor` says what it finds")
    device = torch.device(request["device"] or ("cuda" if torch.cuda.is_available() else "cpu"))
    sized = bool(request.axes or request["preset"])
    table = Table("op", "variant", "here", "tunables", "requires", "from", title=f"variants on {device.type}")
    table.title_justify = "left"
    data: list[dict[str, Any]] = []
    for name in request["op"] or op_names():
        law = contract(name)
        asked: list[Workload] = request.workloads(law) if sized else []
        for entry in entries(name, request["plugin"]):
            row = _row(law, entry, asked, device)
            data.append(row)
            reason = row["reason"]
            here = (
                Text(f"refused: {reason}", style="yellow") if reason else Text(f"yes ({row['place']})", style="green")
            )
            tunables = " ".join(f"{key}={','.join(map(str, choices))}" for key, choices in row["tunables"].items())
            table.add_row(name, row["variant"], here, tunables, ", ".join(row["requires"]), row["origin"])
    return Reply(data, [table])


def _row(law: Contract, entry: Entry, asked: list[Workload], device: torch.device) -> dict[str, Any]:
    """What is known of one variant; `reason` is None if it can run here on every workload asked for."""
    from workbench.registry import place, refusal

    variant = entry.variant
    row: dict[str, Any] = {"op": law.name, "variant": entry.name, "origin": entry.origin, "reason": entry.reason}
    if variant is None:
        return row | {
            "place": None,
            "tunables": {},
            "defaults": {},
            "requires": [],
            "arch": "",
            "file": None,
            "doc": "",
        }
    reason = refusal(variant, None, device)
    for workload in asked:
        if reason is None and (found := refusal(variant, workload, device)) is not None:
            reason = f"{workload.label}: {found}"
    return row | {
        "reason": reason,
        "place": place(variant, device) if reason is None else None,
        "tunables": dict(variant.tunables),
        "defaults": variant.defaults,
        "requires": list(variant.requires),
        "arch": variant.arch,
        "file": str(variant.path),
        "doc": (inspect.getdoc(variant.function) or "").partition("\n")[0],
    }


COMMAND = Command(
    name="variants",
    summary="List an op's variants: which can run here, which are refused and why, what can be tuned.",
    keys=(
        Key("op", ops, "ops to list: a,b or all (default all)"),
        Key("plugin", words, "files of variants of your own, a.py,b.py", default=()),
        Key("device", one_of(("cuda", "cpu")), "cuda or cpu (default: the GPU if there is one)"),
    ),
    run=_run,
    examples=(
        "workbench variants op=lightning_decode",
        "workbench variants op=lightning_decode batch=128 context=1M   # on that workload",
        "workbench variants op=lightning_decode plugin=mine.py",
    ),
    axes=True,
    description="Given axes or a preset, a variant that refuses one of those workloads is shown as refused.",
)
