"""The judge: what each tolerance class passes and fails, one planted error at a time."""

from __future__ import annotations

import math

import pytest
import torch

from reference.random import normal
from workbench.contract import Expected, Output, Tolerance
from workbench.gate.arena import bits, poison
from workbench.gate.judge import Verdict, judge
from workbench.gate.result import Kind
from workbench.gate.run import poisoned

ORACLE = Output(Tolerance.ORACLE)
BITWISE = Output(Tolerance.BITWISE)


def law(rows: int = 64, width: int = 256, key: int = 1) -> tuple[Expected, Expected]:
    """A law of Gaussian rows: rounded to bfloat16, and exact."""
    exact = normal(key, (rows, width), dtype=torch.float32).double()
    return Expected(exact.bfloat16()), Expected(exact)


def verdict(actual: torch.Tensor, model: Expected, oracle: Expected, rule: Output = ORACLE) -> Verdict:
    return judge(rule, actual, poisoned(actual), model, oracle)


def test_the_law_and_an_honest_kernel_pass() -> None:
    model, oracle = law()
    noise = normal(2, oracle.value.shape, scale=2.0**-9, dtype=torch.float32)
    honest = (oracle.value + noise.double() * 1.2).bfloat16()
    assert verdict(model.value, model, oracle).kind is None
    found = verdict(honest, model, oracle)
    assert found.kind is None
    assert 0.5 < found.margin < 1


def test_millions_of_gaussian_errors_as_large_as_allowed_pass_the_element_cap() -> None:
    exact = normal(3, (1 << 11, 1280), dtype=torch.float32)
    model = Expected(exact.bfloat16())
    error = float((model.value.float() - exact).square().mean().sqrt())
    generator = torch.Generator().manual_seed(5)
    # 1.9 times the model's own error, nearly all that the whole tensor is allowed
    actual = exact + torch.randn(exact.shape, generator=generator) * error * 1.9
    assert judge(ORACLE, actual, poisoned(actual), model, Expected(exact.double())).kind is None


@pytest.mark.parametrize("share", [0.05, 0.2, 1.0, -1.0])
def test_a_single_wrong_element_fails(share: float) -> None:
    model, oracle = law(rows=512, width=4096)
    actual = model.value.clone()
    at = (300, int(oracle.value[300].abs().argmin()))  # a small element: an error of a few per cent of the row's scale
    actual[at] = oracle.value[at] + share
    found = verdict(actual, model, oracle)
    assert found.kind is Kind.WRONG_VALUES
    assert found.index == at
    assert found.error == pytest.approx(abs(share), rel=0.01)
    assert "element" in found.detail


def test_a_wrong_row_among_many_fails_though_no_element_stands_out() -> None:
    model, oracle = law(rows=4096)
    actual = model.value.clone()
    actual[77] = (oracle.value[77] * 1.012).bfloat16()
    found = verdict(actual, model, oracle)
    assert found.kind is Kind.WRONG_VALUES
    assert found.index == (77,)
    assert "row" in found.detail


def test_a_small_row_is_judged_by_its_own_scale() -> None:
    model, oracle = law()
    small = torch.where(torch.arange(64)[:, None] == 5, oracle.value * 1e-6, oracle.value)
    model, oracle = Expected(small.bfloat16()), Expected(small)
    actual = model.value.clone()
    actual[5] = 0
    assert verdict(actual, model, oracle).kind is Kind.WRONG_VALUES


def test_rounding_twice_what_the_law_rounds_fails_and_lower_precision_does() -> None:
    model, oracle = law()
    coarse = oracle.value.to(torch.float8_e4m3fn).bfloat16()
    assert verdict(coarse, model, oracle).kind is Kind.WRONG_VALUES


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_not_finite_fails_where_the_law_is_finite(wrong: float) -> None:
    model, oracle = law()
    actual = model.value.clone()
    actual[3, 4] = wrong
    found = verdict(actual, model, oracle)
    assert (found.kind, found.index, found.got) == (Kind.NOT_FINITE, (3, 4), str(wrong))


def test_not_finite_passes_only_as_the_law_has_it() -> None:
    model, oracle = law()
    model.value[0, 0], oracle.value[0, 0] = math.nan, math.nan
    model.value[1, 1], oracle.value[1, 1] = math.inf, math.inf
    assert verdict(model.value.clone(), model, oracle).kind is None
    for wrong in (0.0, math.inf):
        actual = model.value.clone()
        actual[0, 0] = wrong
        assert verdict(actual, model, oracle).kind is not None
    actual = model.value.clone()
    actual[1, 1] = -math.inf
    assert verdict(actual, model, oracle).kind is Kind.NOT_FINITE


def test_poison_left_is_not_written_and_poison_kept_is_right() -> None:
    model, oracle = law()
    actual = model.value.clone()
    bits(actual)[9] = poison(torch.bfloat16)
    assert verdict(actual, model, oracle).kind is Kind.UNWRITTEN
    touched = torch.arange(64) != 9
    sparse = Expected(model.value, touched)
    assert verdict(actual, sparse, oracle).kind is None
    actual[9, 0] = 0
    found = verdict(actual, sparse, oracle)
    assert (found.kind, found.index) == (Kind.PADDING_TOUCHED, (9, 0))


def test_an_inout_keeps_its_contents_where_untouched() -> None:
    before = torch.arange(12.0).reshape(3, 4)
    value = before + 1
    expected = Expected(value, torch.tensor([True, False, True]))
    rule = Output(Tolerance.BITWISE, inout=True)
    actual = value.clone()
    actual[1] = before[1]
    assert judge(rule, actual, before, expected).kind is None
    assert judge(rule, value, before, expected).kind is Kind.PADDING_TOUCHED


def test_bitwise_tells_the_place_and_both_values() -> None:
    value = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    actual = value.clone()
    actual[2, 1] = 0
    found = judge(BITWISE, actual, poisoned(actual), Expected(value))
    assert (found.kind, found.index, found.got, found.expected) == (Kind.WRONG_VALUES, (2, 1), 0, 9)
    negative = torch.zeros(3, dtype=torch.bfloat16)
    assert judge(BITWISE, -negative, poisoned(negative), Expected(negative)).kind is Kind.WRONG_VALUES


# Selections: blocks 0 and 9 forced, 10 not selectable, four to be chosen.

SCORES = torch.tensor([[math.inf, 0.5, 0.25, 1.0, 0.25, 0.125, 0.24, 0.01, 0.02, math.inf, -math.inf]])
RIGHT = [0, 1, 3, 9, -1]


def chosen(blocks: list[int], scores: torch.Tensor = SCORES, count: int = 4) -> Verdict:
    actual = torch.tensor([blocks], dtype=torch.int32)
    expected = Expected(
        torch.tensor([RIGHT], dtype=torch.int32), None, {"scores": scores, "count": torch.tensor([count])}
    )
    return judge(Output(Tolerance.SELECTION), actual, poisoned(actual), expected)


@pytest.mark.parametrize(
    ("blocks", "why"),
    [
        ([0, 1, 3, -1, -1], "fewer"),
        ([0, 1, 3, 4, 9], "past the last"),
        ([1, 0, 3, 9, -1], "ascend"),
        ([0, 1, 1, 9, -1], "twice"),
        ([0, 3, 9, 10, -1], "no key of which"),
        ([0, 1, 3, 4, -1], "forced"),
        ([0, 3, 4, 9, -1], "below"),
        ([0, 3, 9, 11, -1], "exist"),
        ([0, -1, 3, 9, -1], "fewer"),
        ([0, 1, 3, 9, 0], "past the last"),
    ],
)
def test_a_wrong_selection_is_named(blocks: list[int], why: str) -> None:
    found = chosen(blocks)
    assert found.kind is Kind.WRONG_SELECTION
    assert why in found.detail
    assert found.index == (0,)


def test_ties_and_neighbours_may_be_exchanged() -> None:
    assert chosen(RIGHT).kind is None
    assert chosen([0, 1, 2, 3, 9], count=5).kind is None
    assert chosen([0, 1, 3, 4, 9], count=5).kind is None  # equal to block 2
    assert chosen([0, 1, 3, 6, 9], count=5).kind is Kind.WRONG_SELECTION  # 0.24: several steps below 0.25
    near = SCORES.clone()
    near[0, 6] = 0.249  # one step of bfloat16 below 0.25
    assert chosen([0, 1, 3, 6, 9], near, count=5).kind is None


# Tokens.


def token(value: int, slack: float) -> Verdict:
    facts = {"perturbed": torch.tensor([[1.0, 3.0, 3.0, 2.9999, -math.inf]]), "slack": torch.tensor([slack])}
    actual = torch.tensor([value], dtype=torch.int32)
    expected = Expected(torch.tensor([1], dtype=torch.int32), None, facts)
    return judge(Output(Tolerance.TOKENS, row_dims=0), actual, poisoned(actual), expected)


def test_tokens_within_slack_pass_and_greedy_breaks_ties_by_the_lowest() -> None:
    assert token(1, 0.0).kind is None
    assert token(2, 0.0).kind is Kind.WRONG_TOKEN
    assert token(2, 1e-3).kind is None
    assert token(3, 1e-3).kind is None
    for wrong in (0, 4, -1, 5):
        assert token(wrong, 1e-3).kind is Kind.WRONG_TOKEN


def test_a_law_that_does_not_fit_the_contract_is_said_so() -> None:
    model, oracle = law()
    with pytest.raises(ValueError, match="shape"):
        verdict(model.value[:5], model, oracle)
    with pytest.raises(ValueError, match="float64"):
        judge(ORACLE, model.value, poisoned(model.value), model, None)
    with pytest.raises(ValueError, match="scores"):
        judge(Output(Tolerance.SELECTION), model.value.int(), poisoned(model.value.int()), Expected(model.value.int()))
