"""The gate's own test: mutants made and loaded rightly, survivors and false alarms told, real ops sampled."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.workbench import gate_example as example
from workbench.contract import Contract, Mutant, Output, Tolerance, contract, mutants, op_names
from workbench.errors import UsageError
from workbench.gate import Kind, answers_for
from workbench.gate.impostors import IMPOSTORS, forge
from workbench.gate.mutation import copied, folder, law, translate
from workbench.gate.selftest import Outcome, impostor_outcome, law_outcome, mutant_outcome, selftest

EXAMPLE = example.contract()
NO_EPS = Mutant("no_eps", "eps is added", "norms.py", ".double() + eps)", ".double())", "tiny")
EPS_TWICE = Mutant(
    "eps_a_thousandfold", "eps is 1e-6", "norms.py", ".double() + eps)", ".double() + eps * 1000)", "tiny"
)
HARMLESS = Mutant(
    "order_of_a_sum", "any order of the mean", "norms.py", "x.double().square()", "(x.double() * x.double())"
)


def outcome(mutant: Mutant, law: Contract = EXAMPLE) -> Outcome:
    return mutant_outcome(law, answers_for(law, torch.device("cpu")), mutant, 0)


def test_a_mutant_is_killed_in_the_regime_where_it_bites() -> None:
    found = outcome(EPS_TWICE)
    assert found.killed and found.ok
    assert found.by is not None and found.by.regime == "tiny"
    assert found.to_json()["mutant"] == "eps_a_thousandfold"
    assert found.to_json()["by"]["kind"] == "wrong values"


def test_a_survivor_is_told_with_the_regime_that_ought_to_have_caught_it() -> None:
    found = outcome(HARMLESS)
    assert not found.killed and not found.ok
    assert found.ought == "ordinary"


def test_what_the_law_allows_must_pass_and_is_a_false_alarm_if_killed() -> None:
    assert outcome(dataclasses.replace(HARMLESS, allowed=True)).ok
    alarm = outcome(dataclasses.replace(EPS_TWICE, allowed=True))
    assert alarm.killed and not alarm.ok


def test_a_mutant_that_only_raises_proves_nothing() -> None:
    found = outcome(Mutant("breaks", "nothing", "norms.py", "x.double().square()", "x.nonsense()"))
    assert not found.killed and not found.ok
    assert "only raises" in found.note


@pytest.mark.parametrize(
    ("mutant", "word"),
    [
        (Mutant("m", "r", "norms.py", "no such text", "x"), "occurs 0 times"),
        (Mutant("m", "r", "norms.py", "precision", "x"), "must occur once"),
        (Mutant("m", "r", "norms.py", ".square()", ".square()"), "replaced by itself"),
        (Mutant("m", "r", "absent.py", "a", "b"), "reference/absent.py does not exist"),
        (Mutant("m", "r", "norms.py", "def rms_norm(", "def rms_norm(("), "cannot be imported"),
    ],
)
def test_a_mutant_that_does_not_fit_is_refused(mutant: Mutant, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        copied(mutant)
    found = outcome(mutant)
    assert not found.ok and word in found.note


def test_copies_are_packages_of_their_own_that_share_the_precision() -> None:
    twin = copied(EPS_TWICE)
    assert twin.__name__ != "reference"
    assert not str(twin.__path__[0]).startswith(str(folder()))
    assert twin.numerics.MODEL is law().numerics.MODEL
    assert twin.numerics.Precision is law().numerics.Precision
    x = torch.full((1, 4), 1e-3).bfloat16()
    weight = torch.ones(4).bfloat16()
    right = law().norms.rms_norm(x, weight, 1e-6, law().numerics.MODEL)
    assert not torch.equal(twin.norms.rms_norm(x, weight, 1e-6, law().numerics.MODEL), right)


def test_a_weight_reaches_a_copy_as_the_copys_own() -> None:
    from reference.formats import quantise

    twin = copied()
    weight = quantise("bf16", torch.randn(4, 8).bfloat16())
    theirs = translate(weight, twin)
    assert type(theirs) is twin.formats.Weight
    assert torch.equal(theirs.dequantise(), weight.dequantise())


def test_the_whole_selftest_of_the_example_is_clean() -> None:
    told: list[Outcome] = []
    outcomes = selftest(EXAMPLE, subjects=[EPS_TWICE, NO_EPS], report=told.append)
    assert told == outcomes
    wrong = [(o.name, o.note, o.by.sentence if o.by else "") for o in outcomes if not o.ok]
    assert wrong == []
    assert {o.group for o in outcomes} == {"law", "mutant", "impostor", "fault"}
    assert sum(o.group == "impostor" for o in outcomes) == len(IMPOSTORS) * len(EXAMPLE.outputs)
    killed = {o.name for o in outcomes if o.group == "fault" and o.killed}
    assert killed >= {
        "mutates_input",
        "writes_past_end",
        "writes_padded_row",
        "calls_reference",
        "wrong_at_8192",
        "late_write",
    }


def test_a_tolerance_that_lets_zeros_pass_is_a_fault_of_the_gate() -> None:
    loose = example.contract(
        outputs={"total": Output(Tolerance.BITWISE, inout=True), "out": Output(Tolerance.ORACLE, floor=1.0)}
    )
    found = impostor_outcome(loose, answers_for(loose, torch.device("cpu")), "zeros", "out", 0)
    assert not found.ok and "passes" in found.note


def test_a_law_that_fails_its_own_gate_is_a_false_alarm() -> None:
    def biased(law: Any, args: Any, precision: Any) -> Any:
        answers = example.reference(law, args, precision)
        if precision is law.numerics.MODEL:
            out = answers["out"]
            answers["out"] = dataclasses.replace(out, value=out.value * (1.5 if law.__name__ == "reference" else 1.0))
        return answers

    broken = example.contract(reference=biased, outputs={**EXAMPLE.outputs, "out": Output(Tolerance.BITWISE)})
    found = law_outcome(broken, answers_for(broken, torch.device("cpu")), 0)
    assert not found.ok and "false alarm" in found.note


def test_impostors_look_like_answers() -> None:
    rows = torch.arange(1.0, 13).reshape(3, 4)
    assert forge("zeros", rows, rows).abs().sum() == 0
    assert forge("constant", rows, rows).unique().tolist() == [12.0]
    assert forge("mean", rows, rows).unique().tolist() == [6.5]
    assert torch.equal(forge("shuffled", rows, rows).sort(0).values, rows)
    assert forge("shuffled", rows[:1], rows).tolist() == [[4.0, 1.0, 2.0, 3.0]]
    assert forge("stale", rows, rows * 2) is not None


# The faults of the fourth point that are bent rules of the law: each on the op it belongs to.

BENT = [
    ("sparse_select_decode", "window_of_32", Kind.WRONG_SELECTION),
    ("sparse_select_decode", "count_without_window", Kind.WRONG_SELECTION),
    ("sparse_select_decode", "normaliser_over_k1", Kind.WRONG_SELECTION),
    ("lightning_decode", "decay_sign", Kind.WRONG_VALUES),
    ("lightning_prefill", "decay_sign", Kind.WRONG_VALUES),
]


@pytest.mark.parametrize(("op", "name", "kind"), BENT)
def test_bent_rules_are_named(op: str, name: str, kind: Kind) -> None:
    law = contract(op)
    (mutant,) = [mutant for mutant in mutants(op) if mutant.name == name]
    found = outcome(mutant, law)
    assert found.killed and found.by is not None
    assert found.by.kind is kind


@pytest.mark.parametrize("op", op_names())
def test_ten_mutants_an_op_each_fits_the_law_and_the_contract(op: str) -> None:
    law = contract(op)
    subjects = mutants(op)
    assert sum(not mutant.allowed for mutant in subjects) >= 10
    assert len({mutant.name for mutant in subjects}) == len(subjects)
    for mutant in subjects:
        source = (folder() / mutant.file).read_text()
        assert source.count(mutant.old) == 1, f"{mutant.name}: {mutant.old!r} occurs {source.count(mutant.old)} times"
        assert mutant.old != mutant.new
        assert mutant.rule
        assert mutant.caught_by in law.regimes, mutant.name
