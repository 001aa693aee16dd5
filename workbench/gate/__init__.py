"""The gate: whether a variant is right, before anybody asks whether it is fast.

`check` runs a variant on the workload asked for and on the contract's edge workloads, in every regime, and says
what is wrong, where, by how much, and how to repeat it. What it looks for:

- values, by the tolerance class of each output (`judge.py`);
- writes outside the outputs, changed inputs, padding touched, memory left unwritten (`arena.py`);
- results kept from an earlier call, other bits on a second run or at other addresses (`run.py`);
- calls into the law, threads, other streams, CUDA graphs (`watch.py`);
- functions that the gate or the timing uses put out of their place (`seal.py`, in the worker).

Its own worth is measured by mutants of the law and by planted faults (`selftest.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from workbench import registry
from workbench.contract import Contract, Expected, Output, Tolerance, Workload
from workbench.errors import UsageError, nearest
from workbench.gate.answers import Answers, Case
from workbench.gate.judge import judge as judge_output
from workbench.gate.result import Failure, GateResult, Kind
from workbench.gate.run import run_case
from workbench.variant import Variant

__all__ = [
    "Answers",
    "Case",
    "Failure",
    "GateResult",
    "Kind",
    "answers_for",
    "cases",
    "check",
    "edge_cases",
    "run_case",
]

_ANSWERS: dict[tuple[int, str], tuple[Contract, Answers]] = {}
_EDGES_PASSED: dict[tuple[Any, ...], tuple[int, float, tuple[str, ...]]] = {}
"""What came of the edge workloads where they passed: cases, margin, refusals; by variant, parameters and seed."""


def answers_for(contract: Contract, device: torch.device) -> Answers:
    """The store of inputs and of the law's answers that this process shares for a contract."""
    key = id(contract), str(device)
    if key not in _ANSWERS:
        _ANSWERS.clear()  # one op at a time: a sweep over ops must not pile up their inputs
        _ANSWERS[key] = contract, Answers(contract, device)
    return _ANSWERS[key][1]


def cases(
    contract: Contract, workload: Workload, seeds: Sequence[int], regimes: Sequence[str] | None, place: str
) -> Iterator[tuple[Case, bool]]:
    """The cases of the workload asked for, every regime with every seed; and whether each is checked thoroughly.

    On a GPU (`place` "cuda") the first seed is, in every regime; elsewhere, where calls are slow and run alone, the
    first regime is.
    """
    names = tuple(regimes or contract.regimes)
    for seed in seeds:
        for regime in names:
            yield Case(workload, regime, seed), seed == seeds[0] and (place == "cuda" or regime == names[0])


def edge_cases(
    contract: Contract, workload: Workload, seed: int, regimes: Sequence[str] | None, place: str
) -> Iterator[tuple[Case, bool]]:
    """The cases of the contract's edge workloads, but for the one asked for, as `cases` gives them.

    Every regime with one seed. Triton's interpreter is a thousand times slower than a kernel: there each edge gets
    the first regime and one other, in turn.
    """
    names = tuple(regimes or contract.regimes)
    for number, edge in enumerate(contract.gate_workloads):
        turn = dict.fromkeys((names[0], names[1 + number % max(1, len(names) - 1)] if names[1:] else names[0]))
        for regime in turn if place == "interpreter" else names:
            if edge != workload:
                yield Case(edge, regime, seed), place == "cuda" and regime == names[0]


def check(
    contract: Contract,
    variant: Variant,
    workload: Workload,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    regimes: Sequence[str] | None = None,
    device: torch.device | str = "cpu",
    parameters: Mapping[str, Any] | None = None,
    thorough: bool = True,
    edges: bool = True,
) -> GateResult:
    """Hold a variant against the law on one workload.

    `parameters` are tunables given by the user; the rest is resolved for each workload by the registry. With
    `edges` the contract's `gate_workloads` are checked too (once a process for the same variant, parameters
    and seed), except those the variant refuses. Without `thorough` each case is run once and judged.
    Raises UsageError for a regime the contract lacks or a workload the variant refuses.
    """
    device = torch.device(device)
    for regime in regimes or ():
        if regime not in contract.regimes:
            raise UsageError(f"{contract.name} has no regime {regime!r}; {nearest(regime, contract.regimes)}")
    if not seeds:
        raise UsageError("a check needs at least one seed")
    reason = registry.refusal(variant, workload, device)
    if reason is not None:
        raise UsageError(f"{variant.name} refuses {workload.label}: {reason}")
    begun, answers, given = time.perf_counter(), answers_for(contract, device), dict(parameters or {})
    margins: list[float] = []
    graphs: list[str] = []
    skipped: dict[str, None] = {}
    failure, count = None, 0

    def run(case: Case, deep: bool) -> Failure | None:
        nonlocal count
        refused = registry.refusal(variant, case.workload, device)
        if refused is not None:
            skipped[f"{case.workload.label}: {refused}"] = None
            return None
        own = registry.parameters(variant, case.workload, given)
        first = deep and case.regime == (regimes or contract.regimes)[0]
        report = run_case(variant, case, answers, parameters=own, thorough=thorough and deep, first=first)
        count += 1
        margins.extend([report.margin] if report.margin is not None else [])
        graphs.extend([report.graph] if report.graph is not None else [])
        return report.failure

    place = registry.place(variant, device)
    for item in cases(contract, workload, seeds, regimes, place):
        failure = failure or run(*item)
    key = (
        variant.function,
        variant.supports,
        contract.name,
        str(device),
        str(given),
        seeds[0],
        tuple(regimes or ()),
        thorough,
    )
    if edges and key in _EDGES_PASSED:
        done, margin, refused = _EDGES_PASSED[key]
        count += done
        margins.append(margin)
        skipped.update(dict.fromkeys(refused))
    elif edges:
        before = count
        for item in edge_cases(contract, workload, seeds[0], regimes, place):
            failure = failure or run(*item)
        if failure is None:
            _EDGES_PASSED[key] = count - before, max(margins, default=0.0), tuple(skipped)
    if failure is None and not judge_is_sound(device):
        text = "after the run the gate passes what is wrong, or fails what is right"
        failure = Failure(Kind.TAMPERED, text, workload=workload.label)
    refusals = [text for text in graphs if text.startswith("not")]
    graph = refusals[0] if refusals else graphs[0] if graphs else _no_graph(device, thorough)
    return GateResult(
        contract.name, variant.name, workload.label, failure, max(margins, default=None), count, graph,
        time.perf_counter() - begun, tuple(skipped),
    )  # fmt: skip


def _no_graph(device: torch.device, thorough: bool) -> str:
    return "not tried: no GPU" if device.type != "cuda" else "not tried" if thorough else "not tried: quick check"


def judge_is_sound(device: torch.device) -> bool:
    """Whether the judge still fails what is wrong and passes what is right.

    A variant shares its process with the gate and could have changed functions that the judge uses.
    """
    rule = Output(Tolerance.ORACLE)
    right = torch.linspace(-2, 2, 512, device=device).reshape(2, 256)
    law, exact = Expected(right.bfloat16()), Expected(right.double())
    bad = right.clone()
    bad[1, 7] += 0.25
    before = torch.full_like(law.value, torch.nan)
    wrong = (bad.bfloat16(), torch.zeros_like(law.value), before)
    sound = [judge_output(rule, right.bfloat16(), before, law, exact).kind is None]
    sound += [judge_output(rule, x, before, law, exact).kind is not None for x in wrong]
    return all(sound) and not bool(torch.equal(bad, right))
