"""`workbench selftest`: the gate's kill rate against mutants, impostors and planted faults."""

from __future__ import annotations

from typing import Any

from workbench.command import Command, Key, Reply, Request, one_of, ops, size, words

_GROUPS = {"mutant": "mutants", "impostor": "impostors", "fault": "faults", "law": "law"}


def _run(request: Request) -> Reply:
    import torch
    from rich.table import Table
    from rich.text import Text

    from workbench.contract import contract, mutants
    from workbench.errors import UsageError, nearest
    from workbench.gate.mutation import device as device_named
    from workbench.gate.selftest import Outcome, selftest

    if request["device"] == "cuda" and not torch.cuda.is_available():
        raise UsageError("device=cuda: PyTorch finds no GPU here; `workbench doctor` says what it finds")
    if torch.get_num_threads() > 1 and device_named(request["device"]).type == "cpu":
        torch.set_num_threads(min(4, torch.get_num_threads()))
    data: list[dict[str, Any]] = []
    text: list[Any] = []
    failed = False
    for name in request["op"]:
        law = contract(name)
        subjects = list(mutants(name))
        known = [mutant.name for mutant in subjects]
        for wanted in request["mutant"] or ():
            if wanted not in known:
                raise UsageError(f"{name} has no mutant {wanted!r}; {nearest(wanted, known)}")
        if request["mutant"]:
            subjects = [mutant for mutant in subjects if mutant.name in request["mutant"]]
        table = Table(name, "", "rule", "caught by", title_justify="left")

        def show(outcome: Outcome, table: Table = table, name: str = name) -> None:
            word, style = _word(outcome)
            request.progress.print(f"{name}: {outcome.group} {outcome.name}: {word}")
            caught = f"{outcome.by.kind.value}, {outcome.by.regime}, {outcome.by.workload}" if outcome.by else ""
            if not outcome.ok and not outcome.killed and outcome.ought:
                caught = f"ought to be caught in regime {outcome.ought}"
            caught += f" ({outcome.note})" if outcome.note and caught else outcome.note
            table.add_row(f"{outcome.group} {outcome.name}", Text(word, style=style), outcome.rule, caught)

        outcomes = selftest(
            law, device=device_named(request["device"]), seed=request["seed"], subjects=subjects, report=show
        )
        entry: dict[str, Any] = {"op": name}
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
        failed = failed or not entry["ok"]
        wrong = [o for o in outcomes if not o.ok]
        alarms = [o for o in wrong if o.group == "law" or o.allowed]
        verdict = Text(f"{name}: killed {', '.join(counts)}", style="green" if entry["ok"] else "bold red")
        if alarms:
            verdict.append(f"; false alarms: {', '.join(o.name for o in alarms)}")
        survivors = [o for o in wrong if o not in alarms]
        if survivors:
            verdict.append(f"; to mend: {', '.join(o.name for o in survivors)}")
        text += [table, verdict]
        data.append(entry)
    return Reply(data if len(data) != 1 else data[0], text, 1 if failed else 0)


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
