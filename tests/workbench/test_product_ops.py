"""Contracts of `linear`, `fused_mlp` and `sampling`: inputs, costs, and the facts that tell right tokens from wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import reference.formats
import reference.mlp
import reference.numerics
import reference.sampling
from workbench.contract import contract
from workbench.errors import UsageError
from workbench.gate.mutation import law

CPU = torch.device("cpu")
OPS = ("linear", "fused_mlp", "sampling")


@pytest.mark.parametrize("op", OPS)
def test_inputs_depend_on_seed_and_regime_alone(op: str) -> None:
    rules = contract(op)
    workload = rules.presets["smoke"][1]
    for regime in rules.regimes:
        first, again, other = (rules.make_inputs(workload, seed, regime, CPU) for seed in (5, 5, 6))
        lead = "logits" if op == "sampling" else "x"
        assert torch.equal(first[lead].nan_to_num(7), again[lead].nan_to_num(7))
        assert not torch.equal(first[lead].nan_to_num(7), other[lead].nan_to_num(7))
        assert first[lead].stride(-1) == 1
        assert (first[lead].stride(0) > first[lead].shape[1]) is (regime == "strided")


@pytest.mark.parametrize("op", OPS)
def test_every_preset_costs_something(op: str) -> None:
    rules = contract(op)
    for workload in (*(w for preset in rules.presets.values() for w in preset), *rules.gate_workloads):
        cost = rules.cost(workload)
        assert cost.bytes_read > 0 and cost.bytes_written > 0
        assert cost.rate == ("fp8" if dict(workload.axes).get("activations") == "fp8" else "bf16")


def test_costs_of_the_released_mlp() -> None:
    rules = contract("fused_mlp")
    one, four_bit = rules.cost(rules.workload()), rules.cost(rules.workload(format="w4a16"))
    assert one.flops == 2 * 201_326_592
    assert one.bytes_read == 402_653_184 + 8192
    assert four_bit.bytes_read == 201_326_592 * 4.125 / 8 + 8192


def test_shapes_a_format_cannot_hold_are_usage_errors() -> None:
    rules = contract("linear")
    with pytest.raises(UsageError, match="K=192 is not a multiple of the group of 128"):
        rules.make_inputs(rules.workload(tokens=1, n=8, k=192, format="w4a16"), 0, "ordinary", CPU)
    with pytest.raises(UsageError, match="needs format=fp8_row or fp8_block, not w8a16"):
        rules.cost(rules.workload(format="w8a16", activations="fp8"))


def ask(logits: list[float], step: int, top_k: int = 0, top_p: float = 1.0, temperature: float = 1.0) -> dict[str, Any]:
    return {
        "logits": torch.tensor([logits], dtype=torch.bfloat16),
        "temperature": torch.tensor([temperature]),
        "top_k": torch.tensor([top_k], dtype=torch.int32),
        "top_p": torch.tensor([top_p]),
        "seed": torch.tensor([11]),
        "step": torch.tensor([step]),
        "tokens": torch.zeros(1, dtype=torch.int32),
    }


def right_tokens(args: dict[str, Any]) -> tuple[set[int], Tensor]:
    """Tokens within slack of the best, and the scores before filters."""
    expected = contract("sampling").reference(law(), args, reference.numerics.ORACLE)["tokens"]
    scores, slack = expected.facts["perturbed"][0], expected.facts["slack"][0]
    right = set((scores >= scores.max() - slack).nonzero()[:, 0].tolist())
    assert int(expected.value) in right
    noise = reference.sampling.gumbel(args["seed"], args["step"], scores.numel())[0]
    return right, args["logits"][0].double() + noise


def test_tokens_at_the_edge_of_top_p_are_right_only_where_a_rounded_cut_gives_them() -> None:
    """Four equal tokens and p = ½: a kernel's sum of two may fall short, so the third may stay, never the fourth."""
    seen = set()
    for step in range(40):
        right, scores = right_tokens(ask([1.0, 1.0, 1.0, 1.0] + [-60.0] * 4, step, top_p=0.5))
        by_two, by_three = int(scores[:2].argmax()), int(scores[:3].argmax())
        assert right == {by_two, by_three}
        seen.add(len(right))
    assert seen == {1, 2}


def test_elsewhere_exactly_one_token_is_right() -> None:
    logits = [0.5, 2.0, 1.0, 1.0, 0.0, -1.0, 1.5, 1.0]
    for step in range(20):
        for top_k, top_p in ((0, 1.0), (3, 1.0), (0, 0.6), (4, 0.9)):
            right, scores = right_tokens(ask(logits, step, top_k, top_p))
            assert len(right) == 1
            if (top_k, top_p) == (0, 1.0):
                assert right == {int(scores.argmax())}


def test_greedy_rows_have_one_right_token_and_no_slack() -> None:
    args = ask([0.0, 3.0, 3.0, 1.0, 3.0, 0.0, 0.0, 0.0], 0, temperature=0.0)
    expected = contract("sampling").reference(law(), args, reference.numerics.MODEL)["tokens"]
    assert float(expected.facts["slack"]) == 0.0
    assert expected.facts["perturbed"][0].isfinite().nonzero()[:, 0].tolist() == [1]
