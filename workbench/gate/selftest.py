"""The gate's own test: mutants of the law, impostors and planted faults, and what caught each.

For each op, in this order: the law itself as a variant (it must pass); every mutant made for the op (it must be
killed, or, where the law allows the change, pass); every impostor of every output on every workload; every fault
of conduct. All run on the contract's smoke workloads and edge workloads until something is found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from workbench.contract import Contract, Mutant, Tolerance, Workload, mutants
from workbench.errors import UsageError
from workbench.gate import answers_for
from workbench.gate.answers import Answers, Case
from workbench.gate.faults import Fault, Planted, faults
from workbench.gate.impostors import IMPOSTORS, impostor
from workbench.gate.mutation import as_variant, copied
from workbench.gate.result import Failure, Kind
from workbench.gate.run import DECOY, run_case
from workbench.variant import Variant

_NOT_A_KILL = frozenset({Kind.REFERENCE_BROKE, Kind.CALLS_REFERENCE})


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one subject.

    `group` is `law`, `mutant`, `impostor` or `fault`. `ok` says that the gate did what it should; `by` is what it
    found. `ought` names the regime that should have caught a survivor. `note` says what else there is to know (why
    a fault does not apply, what broke).
    """

    group: str
    name: str
    rule: str
    killed: bool
    ok: bool
    by: Failure | None = None
    ought: str = ""
    allowed: bool = False
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """This outcome as JSON-able data, under its group's name: `{"mutant": …, "killed": …, "by": …}`.

        A mutant that the law allows, and that the gate must let pass, goes under `"allowed"` instead.
        """
        by = None
        if self.by is not None:
            by = {
                "kind": self.by.kind.value,
                "regime": self.by.regime,
                "workload": self.by.workload,
                "seed": self.by.seed,
                "sentence": self.by.sentence,
            }
        return {
            "allowed" if self.allowed else self.group: self.name,
            "killed": self.killed,
            "ok": self.ok,
            "by": by,
            "rule": self.rule,
            "ought": self.ought,
            "note": self.note,
        }


def sizes(contract: Contract) -> list[Workload]:
    """The smoke and edge workloads, the cheapest first."""
    every = dict.fromkeys([*contract.presets.get("smoke", ()), *contract.gate_workloads])
    return sorted(every, key=lambda workload: contract.cost(workload).bytes_read + contract.cost(workload).flops)


def ordered(contract: Contract, regime: str, seed: int) -> Iterator[Case]:
    """All cases, those of `regime` first."""
    first = [regime] if regime in contract.regimes else []
    for name in [*first, *(other for other in contract.regimes if other not in first)]:
        for workload in sizes(contract):
            yield Case(workload, name, seed)


def selftest(
    contract: Contract,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    subjects: Sequence[Mutant] | None = None,
    report: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run the gate's own test on one op; `report` is told each outcome as it is known.

    `subjects` are the mutants, those of `workbench/mutants/<op>.py` unless given.
    """
    answers = answers_for(contract, torch.device(device))
    outcomes: list[Outcome] = []

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        report(outcome)

    note(law_outcome(contract, answers, seed))
    for mutant in mutants(contract.name) if subjects is None else subjects:
        note(mutant_outcome(contract, answers, mutant, seed))
    for kind in IMPOSTORS:
        for output in contract.outputs:
            note(impostor_outcome(contract, answers, kind, output, seed))
    for fault in faults():
        note(fault_outcome(contract, answers, fault, seed))
    return outcomes


def _run(variant: Variant, case: Case, answers: Answers, *, thorough: bool) -> Failure | None:
    return run_case(variant, case, answers, parameters={}, thorough=thorough, first=thorough).failure


def law_outcome(contract: Contract, answers: Answers, seed: int) -> Outcome:
    """The unbent law must pass everywhere, and everything that is watched."""
    variant = as_variant(contract, copied(), "law")
    rule = "the law itself passes"
    for case in ordered(contract, contract.regimes[0], seed):
        found = _run(variant, case, answers, thorough=case.regime == contract.regimes[0])
        if found is not None:
            return Outcome("law", "law", rule, True, False, found, note="a false alarm, or a broken contract")
    return Outcome("law", "law", rule, False, True)


def mutant_outcome(contract: Contract, answers: Answers, mutant: Mutant, seed: int) -> Outcome:
    """One mutant on every case, those of the regime that ought to catch it first, until a value is wrong."""
    fields: dict[str, Any] = {"ought": mutant.caught_by, "allowed": mutant.allowed}
    try:
        variant = as_variant(contract, copied(mutant), mutant.name)
    except UsageError as broken:
        return Outcome("mutant", mutant.name, mutant.rule, False, False, note=str(broken), **fields)
    raised: Failure | None = None
    for case in ordered(contract, mutant.caught_by, seed):
        found = _run(variant, case, answers, thorough=False)
        if found is None:
            continue
        if found.kind is Kind.RAISED:  # proves nothing of the judge; other inputs may
            raised = raised or found
            continue
        real = found.kind not in _NOT_A_KILL
        note = "" if real else "not the mutant but the contract failed"
        return Outcome(
            "mutant", mutant.name, mutant.rule, real, real and not mutant.allowed, found, note=note, **fields
        )
    note = "" if raised is None else "it never answers wrongly, it only raises"
    ok = mutant.allowed and raised is None
    return Outcome("mutant", mutant.name, mutant.rule, False, ok, raised, note=note, **fields)


def impostor_outcome(contract: Contract, answers: Answers, kind: str, output: str, seed: int) -> Outcome:
    """One impostor of one output: it must fail on every workload, in one regime at least."""
    name, found = f"{kind}({output})", None
    rule = f"{kind} in the place of {output} fails on every workload"
    same: list[str] = []
    for workload in sizes(contract):
        killed = distinct = False
        for regime in contract.regimes:
            case = Case(workload, regime, seed)
            other = dataclasses.replace(case, seed=seed + DECOY)
            variant = impostor(contract, kind, output, answers.expected(case)[0], answers.expected(other)[0])
            if variant is None:
                continue
            distinct = True
            failure = _run(variant, case, answers, thorough=False)
            if failure is not None:
                found, killed = found or failure, True
                break
        if not killed and distinct:
            return Outcome(
                "impostor", name, rule, False, False, ought=contract.regimes[0], note=f"passes {workload.label}"
            )
        if not distinct:
            same.append(workload.label)
    note = f"no different from the law on {'; '.join(same)}" if same else ""
    return Outcome("impostor", name, rule, found is not None, found is not None, found, note=note)


def fault_outcome(contract: Contract, answers: Answers, fault: Fault, seed: int) -> Outcome:
    """One planted fault, on the workloads where it shows, until the gate finds it."""
    fields: dict[str, Any] = {"ought": fault.regime}
    if fault.cuda and answers.device.type != "cuda":
        return Outcome("fault", fault.name, fault.rule, False, True, note="not tried: needs a GPU", **fields)
    if fault.at is not None and not any(name in contract.axes for name in fault.at[0]):
        axes = " or ".join(fault.at[0])
        return Outcome("fault", fault.name, fault.rule, False, True, note=f"does not apply: no axis {axes}", **fields)
    if fault.floats and all(o.tolerance in (Tolerance.SELECTION, Tolerance.TOKENS) for o in contract.outputs.values()):
        note = "does not apply: whole numbers cannot be NaN"
        return Outcome("fault", fault.name, fault.rule, False, True, note=note, **fields)
    planted = Planted(contract, fault, copied())
    shown, regimes = False, (fault.regime, contract.regimes[0])
    for case in ordered(contract, fault.regime, seed):
        if not fault.applies(contract, case.workload) or case.regime not in regimes:
            continue
        found = _run(planted.variant, case, answers, thorough=fault.at is None)
        shown = shown or planted.shown
        if found is not None:
            ok = found.kind in fault.kinds
            note = "" if ok else f"found as {found.kind.value!r}, not by its name"
            return Outcome("fault", fault.name, fault.rule, True, ok, found, note=note, **fields)
    if fault.at is not None and not shown:
        note = f"no smoke or edge workload has {' or '.join(fault.at[0])} = {fault.at[1]}"
        return Outcome("fault", fault.name, fault.rule, False, False, note=note, **fields)
    note = "" if shown else "does not apply: no inputs give it a place"
    return Outcome("fault", fault.name, fault.rule, False, not shown, note=note, **fields)
