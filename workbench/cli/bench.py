"""`workbench bench`: race an op's variants, each gated first, and keep what was measured."""

from __future__ import annotations

import re
import shlex
import time
from typing import TYPE_CHECKING, Any

from workbench.command import Command, Key, Reply, Request, count, duration, flag, op, words
from workbench.errors import UsageError, nearest

if TYPE_CHECKING:
    from rich.console import Console

    from workbench.competitor import Entrant
    from workbench.contract import Contract, Workload
    from workbench.race import Race
    from workbench.sweep import Outcome

BUDGET_S = {"cuda": 30.0, "cpu": 10.0}
"""Default time of a race, a workload."""

FINE = ("ok", "refused", "unavailable")
"""Statuses that leave the exit code at 0."""


def _run(request: Request) -> Reply:
    from workbench.contract import contract
    from workbench.store import Store
    from workbench.sweep import Plan, Sweep, default_device

    law = contract(request["op"])
    device = _device(request["device"] or default_device())
    with Store(request["store"]) as store:
        entrants, machine = _entrants(request, law, device)
        plan = Plan(
            contract=law,
            workloads=request.workloads(law, _preset(law, device)),
            entrants=entrants,
            device=device,
            machine=machine,
            budget_s=request["budget"] or BUDGET_S[device.partition(":")[0]],
            seeds=range(request["seeds"]),
            plugins=request["plugin"],
            timeout_s=request["timeout"],
            command=shlex.join(["workbench", "bench", *request.words]),
        )
        progress = _Progress(request.progress)
        sweep = Sweep(plan, store, fresh=request["fresh"], tell=progress.tell, on_race=progress.round)
        outcome = sweep.run()
        return _reply(outcome, store.shown, plan.command)


def _device(name: str) -> str:
    import torch

    kind = name.partition(":")[0]
    if kind not in BUDGET_S:
        raise UsageError(f"device={name}: {nearest(kind, BUDGET_S)}")
    if re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
        raise UsageError(f"device={name}: write it as cuda, cuda:1 or cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device={name}: PyTorch finds no GPU here; `workbench doctor` says what it finds")
    return name


def _preset(law: Contract, device: str) -> str:
    """What is raced where nothing is said: sizes of the released model on a GPU, small ones on a CPU."""
    wanted = ("decode", "prefill", "smoke") if device.startswith("cuda") else ("smoke",)
    return next((name for name in wanted if name in law.presets), next(iter(law.presets)))


def _entrants(request: Request, law: Contract, device: str) -> tuple[list[Entrant], dict[str, Any]]:
    """Who races, those named or all; and facts of the machine.

    Both are asked of a worker, so that this process never runs a variant's code nor takes the GPU's memory.
    """
    from workbench.competitor import Entrant
    from workbench.record import Failure, Status
    from workbench.worker import Worker

    with Worker(device) as worker:
        try:
            listed = worker.ask("entries", op=law.name, plugins=list(request["plugin"]))["entries"]
        except Failure as failure:
            if failure.status is Status.REFUSED:  # a mistake in what was asked for
                raise UsageError(failure.reason.removeprefix("UsageError: ")) from None
            files = f"plugin={','.join(request['plugin'])}" if request["plugin"] else f"the variants of {law.name}"
            raise UsageError(f"{files} can't be listed: {failure.reason}") from None
        machine = dict(worker.hello["machine"])
    known: dict[str, dict[str, list[str]]] = {entry["name"]: entry["tunables"] for entry in listed}
    if not known:
        raise UsageError(f"{law.name} has no variants; `workbench new op={law.name} name=mine` writes one")
    asked = request["variant"] or list(known)
    found: list[Entrant] = []
    for word in asked:
        name, *settings = word.split(":")
        if name not in known:
            raise UsageError(f"{law.name} has no variant {name!r}; {nearest(name, known)}")
        parameters = dict(_setting(name, text, known[name]) for text in settings)
        twins = sum(entrant.label.partition("#")[0] == word for entrant in found)
        found.append(Entrant(f"{word}#{twins + 1}" if twins else word, name, parameters))
    return found, machine


def _setting(variant: str, text: str, tunables: dict[str, list[str]]) -> tuple[str, str]:
    """`block_v=64` of `variant=triton_fused:block_v=64`."""
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"variant={variant}:{text}: write parameters as {variant}:name=value")
    if name not in tunables:
        known = nearest(name, tunables) if tunables else "it has none"
        raise UsageError(f"variant {variant} has no tunable {name!r}; {known}")
    if value not in tunables[name]:
        raise UsageError(f"{variant}:{name}={value}: {nearest(value, tunables[name])}")
    return name, value


class _Progress:
    """Lines on standard error: what is being done, and every few seconds how the race stands."""

    def __init__(self, console: Console, every_s: float = 5.0) -> None:
        self.console, self.every_s, self.last = console, every_s, time.monotonic()

    def tell(self, line: str) -> None:
        self.last = time.monotonic()
        self.console.print(line, style="dim")

    def round(self, workload: Workload, race: Race) -> None:
        if time.monotonic() - self.last < self.every_s:
            return
        order = sorted(race.alive, key=lambda track: sorted(track.medians.values())[len(track.blocks) // 2])
        first = f", {order[0].rival.label} leads" if order else ""
        self.tell(f"{workload.label}: round {len(race.seeds)}{first}")


def _reply(outcome: Outcome, store: str, command: str) -> Reply:
    from rich.text import Text

    from workbench.tables import footer, race_table

    text: list[Any] = []
    for result in outcome.results:
        text += [race_table(result), ""]
    text += footer(outcome, store)
    data: dict[str, Any] = {
        "run": outcome.run,
        "store": store,
        "machine": outcome.machine,
        "ceilings": outcome.ceilings,
        "resumed": outcome.resumed,
        "interrupted": outcome.interrupted,
        "results": [
            {
                "workload": result.workload.label,
                "stopped": result.stopped,
                "kept": result.kept,
                "rows": [_row(row.to_json(), name) for row, name in zip(result.rows, result.ids)],
            }
            for result in outcome.results
        ],
    }
    bad = any(row.status.value not in FINE for result in outcome.results for row in result.rows)
    if outcome.interrupted:
        data["continue"] = command
        kept = "what is shown is kept" if outcome.results else "gates passed so far are kept"
        line = f"interrupted; {kept}. Go on with the same line: {command}"
        return Reply(data, [*text, Text(line, style="yellow")], 130)
    return Reply(data, text, 1 if bad else 0)


def _row(record: dict[str, Any], name: str) -> dict[str, Any]:
    """A measurement without its raw samples, which `show` has."""
    left_out = ("rounds_us", "seeds", "conditions", "detail", "fingerprint")
    return {"id": name, **{key: value for key, value in record.items() if key not in left_out}}


COMMAND = Command(
    name="bench",
    summary="Race an op's variants: gate each, time them interleaved, give verdicts, keep everything.",
    keys=(
        Key("op", op, "the op to race", required=True),
        Key("variant", words, "who races: a,b or with parameters a:block_v=64,b (default: all)"),
        Key("budget", duration, "longest time of one workload's race, as 60s (default: 30s on a GPU, 10s on a CPU)"),
        Key("seeds", count, "how many seeds the gate tries on each regime (default 1)", default=1),
        Key("plugin", words, "files of variants of your own, a.py,b.py", default=()),
        Key("device", str, "cuda, cuda:1 or cpu (default: the GPU if there is one)"),
        Key("timeout", duration, "longest time a variant may take to load, build or be gated", default=600.0),
        Key("store", str, "database URL or path (default: $WORKBENCH_STORE, else .workbench/store.db)"),
        Key("fresh", flag, "yes: measure anew what an interrupted run has finished, ceilings too", default=False),
    ),
    run=_run,
    examples=(
        "workbench bench op=lightning_decode",
        "workbench bench op=lightning_decode batch=1,8,32,128",
        "workbench bench op=lightning_decode variant=eager,triton_fused:block_v=64 budget=60s",
        "workbench bench op=fused_mlp preset=decode plugin=mine.py --json",
    ),
    axes=True,
    description=(
        "Each variant runs in a process of its own; a crash, a hang or a lost GPU costs its row. A race ends when every"
        " verdict (FASTER, SLOWER, SAME) is clear or the budget is spent. A run that was cut off goes on when the same"
        " line is repeated. Exit code 1 if a variant failed its gate or crashed, 130 after Ctrl-C."
    ),
)
