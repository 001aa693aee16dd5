"""`workbench selftest`: the gate's kill rate against mutants, impostors and planted faults."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from workbench.command import Command, Key, Reply, Request, one_of, ops, size, words

if TYPE_CHECKING:
    from workbench.contract import Mutant
    from workbench.gate.selftest import Outcome

_GROUPS = {"mutant": "mutants", "impostor": "impostors", "fault": "faults", "law": "law"}


def _run(request: Request) -> Reply:
    import torch
    from rich.table import Table
    from rich.text import Text

    from workbench.contract import contract
    from workbench.errors import UsageError
    from workbench.gate.mutation import device as device_named
    from workbench.gate.selftest import selftest

    if request["device"] == "cuda" and not torch.cuda.is_available():
        raise UsageError("device=cuda: PyTorch finds no GPU here; `workbench doctor` says what it finds")
    if torch.get_num_threads() > 1 and device_named(request["device"]).type == "cpu":
        torch.set_num_threads(min(4, torch.get_num_threads()))
    chosen = {name: _chosen(name, request["mutant"]) for name in request["op"]}
    data: list[dict[str, Any]] = []
    text: list[Any] = []
    for position, name in enumerate(request["op"]):
        table = Table(name, "", "rule", "caught by", title_justify="left")
        outcomes: list[Outcome] = []

        def show(outcome: Outcome, outcomes: list[Outcome] = outcomes, table: Table = table, name: str = name) -> None:
            outcomes.append(outcome)
            word, style = _word(outcome)
            request.progress.print(f"{name}: {outcome.group} {outcome.name}: {word}")
            caught = f"{outcome.by.kind.value}, {outcome.by.regime}, {outcome.by.workload}" if outcome.by else ""
            if not outcome.ok and not outcome.killed and outcome.ought:
                caught = f"ought to be caught in regime {outcome.ought}"
            caught += f" ({outcome.note})" if outcome.note and caught else outcome.note
            table.add_row(f"{outcome.group} {outcome.name}", Text(word, style=style), outcome.rule, caught)

        interrupted = False
        try:
            selftest(
                contract(name),
                device=device_named(request["device"]),
                seed=request["seed"],
                subjects=chosen[name],
                report=show,
            )
        except KeyboardInterrupt:
            interrupted = True
        entry, verdict = _summary(name, outcomes)
        text += [table, Text(verdict, style="green" if entry["ok"] else "bold red")]
        data.append(entry)
        if interrupted:
            entry["ok"] = False
            left = ",".join(request["op"][position:])
            line = shlex.join(
                ["workbench", "selftest", *(w for w in request.words if not w.startswith("op=")), f"op={left}"]
            )
            text.append(Text(f"interrupted; what is left: {line}", style="yellow"))
            break
    code = 130 if interrupted else 0 if all(entry["ok"] for entry in data) else 1
    return Reply(data if len(data) != 1 else data[0], text, code)


def _chosen(op: str, asked: list[str] | None) -> list[Mutant]:
    """The op's mutants, those asked for if any are; UsageError with the nearest name."""
    from workbench.contract import mutants
    from workbench.errors import UsageError, nearest

    subjects = list(mutants(op))
    known = [mutant.name for mutant in subjects]
    for name in asked or ():
        if name not in known:
            raise UsageError(f"{op} has no mutant {name!r}; {nearest(name, known)}")
    return [mutant for mutant in subjects if not asked or mutant.name in asked]


def _summary(op: str, outcomes: list[Outcome]) -> tuple[dict[str, Any], str]:
    """What an op came to, as data and in a sentence."""
    entry: dict[str, Any] = {"op": op}
    counts = []
    for group, plural in _GROUPS.items():
        members = [outcome for outcome in outcomes if outcome.group == group and not outcome.allowed]
        entry[plural] = [outcome.to_json() for outcome in members]
        due = [o for o in members if o.killed or not o.ok]
        if group != "law":
            counts.append(f"{sum(o.killed and o.ok for o in due)} of {len(due)} {plural}")
    due = [o for o in outcomes if o.group == "mutant" and not o.allowed]
    entry["allowed"] = [outcome.to_json() for outcome in outcomes if outcome.allowed]
    entry["kill_rate"] = sum(o.ok for o in due) / len(due) if due else None
    entry["ok"] = all(outcome.ok for outcome in outcomes)
    wrong = [o for o in outcomes if not o.ok]
    alarms = [o for o in wrong if o.group == "law" or o.allowed]
    survivors = [o for o in wrong if o not in alarms]
    verdict = f"{op}: killed {', '.join(counts)}"
    verdict += f"; false alarms: {', '.join(o.name for o in alarms)}" if alarms else ""
    verdict += f"; to mend: {', '.join(o.name for o in survivors)}" if survivors else ""
    return entry, verdict


def _word(outcome: Any) -> tuple[str, str]:
    """What became of a subject in a word, and its colour."""
    if outcome.group == "law" or outcome.allowed:
        return ("passes, as it must", "green") if outcome.ok else ("FALSE ALARM", "bold red")
    if outcome.ok:
        return ("killed", "green") if outcome.killed else ("not tried", "yellow")
    return ("MISNAMED" if outcome.killed else "SURVIVES", "bold red")


COMMAND = Command(
    name="selftest",
    summary="Test the gate itself: mutants of the law, impostors and planted faults, and what catches each.",
    keys=(
        Key("op", ops, "ops to test: a,b or all", required=True),
        Key("mutant", words, "mutants to try: a,b (default: all made for the op)"),
        Key("seed", size, "seed of the inputs", default=0),
        Key("device", one_of(("cuda", "cpu")), "cuda or cpu (default: the GPU if there is one)"),
    ),
    run=_run,
    examples=(
        "workbench selftest op=lightning_decode",
        "workbench selftest op=all --json",
        "workbench selftest op=sampling mutant=greedy_highest_id",
    ),
    description=(
        "Exit code 1 if one survives that must be killed, or one is killed that the law allows. A survivor is shown "
        "with the regime of inputs that ought to have caught it."
    ),
)
