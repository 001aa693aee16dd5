"""Faults of conduct planted into real variants of real ops, each named by the gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench import gate, registry
from workbench.contract import Workload, contract
from workbench.gate import GateResult, Kind
from workbench.gate.mutation import of_function

Function = Callable[..., None]


def check(
    op: str, bend: Callable[[Function], Function], workload: Workload | None = None, **options: Any
) -> GateResult:
    """Gate the op's eager variant with a fault planted into it."""
    law = contract(op)
    subject = of_function(law, bend(registry.find(op, "eager").function), "planted")
    size = workload or min(law.presets["smoke"], key=lambda w: law.cost(w).bytes_read)
    return gate.check(law, subject, size, **{"seeds": (0,), "edges": False, **options})


def kind(op: str, bend: Callable[[Function], Function], **options: Any) -> Kind | None:
    failure = check(op, bend, **options).failure
    return failure.kind if failure else None


@pytest.mark.parametrize("op", ["lightning_decode", "sparse_attention_decode", "residual_rmsnorm"])
def test_the_eager_variant_itself_passes(op: str) -> None:
    result = check(op, lambda eager: eager, regimes=("ordinary",))
    assert result.passed, result.failure


def test_a_padded_slot_that_writes_slot_0() -> None:
    def bend(eager: Function) -> Function:
        def function(**args: Any) -> None:
            eager(**args)
            if bool((args["slots"] < 0).any()):
                args["state"][0] *= 0.9

        return function

    size = contract("lightning_decode").workload(batch=3, heads=2, context=65)
    found = check("lightning_decode", bend, size, regimes=("padded",)).failure
    assert found is not None and found.output == "state"
    assert found.kind in (Kind.PADDING_TOUCHED, Kind.WRONG_VALUES)  # by whether slot 0 is somebody's


def test_nan_left_in_a_row_nobody_chose() -> None:
    def bend(eager: Function) -> Function:
        def function(**args: Any) -> None:
            eager(**args)
            # attends to every block with weight nought where it is not chosen: NaN times nought is NaN
            args["out"].add_(args["v_cache"].float().sum() * 0)

        return function

    found = check("sparse_attention_decode", bend, regimes=("unchosen",)).failure
    assert found is not None
    assert (found.kind, found.output) == (Kind.NOT_FINITE, "out")


def test_zeros_for_large_inputs() -> None:
    def bend(eager: Function) -> Function:
        def function(**args: Any) -> None:
            eager(**args)
            if float(args["qkvz"].abs().max()) > 100:
                args["out"].zero_()

        return function

    found = check("lightning_decode", bend).failure
    assert found is not None
    assert (found.kind, found.regime, found.output) == (Kind.WRONG_VALUES, "large", "out")


@pytest.mark.parametrize(("axis", "size"), [("context", 8192), ("batch", 3)])
def test_wrong_at_one_size_is_caught_by_an_edge_workload(axis: str, size: int) -> None:
    def bend(eager: Function) -> Function:
        def function(**args: Any) -> None:
            eager(**args)
            if size in (int(args["positions"].max()) + 1, len(args["positions"])):
                args["out"][-1] *= 1.02

        return function

    law = contract("lightning_decode")
    asked = law.workload(batch=1, heads=2, context=64)
    found = check("lightning_decode", bend, asked, regimes=("ordinary",), edges=True).failure
    assert found is not None
    assert f"{axis}={'8k' if size == 8192 else size}" in found.workload
    assert found.kind is Kind.WRONG_VALUES


def test_a_result_kept_under_the_address_of_the_input() -> None:
    def bend(eager: Function) -> Function:
        kept: dict[int, Tensor] = {}

        def function(**args: Any) -> None:
            eager(**args)
            args["out"].copy_(kept.setdefault(args["qkvz"].data_ptr(), args["out"].clone()))

        return function

    assert kind("lightning_decode", bend, regimes=("ordinary",)) is Kind.STALE


def test_the_last_calls_output() -> None:
    def bend(eager: Function) -> Function:
        kept: list[Tensor] = []

        def function(**args: Any) -> None:
            eager(**args)
            kept.append(args["out"].clone())
            args["out"].copy_(kept[max(0, len(kept) - 2)])

        return function

    assert kind("lightning_decode", bend, regimes=("ordinary",)) is Kind.STALE


def test_a_constant() -> None:
    def bend(eager: Function) -> Function:
        def function(**args: Any) -> None:
            eager(**args)
            args["out"].fill_(0.5)

        return function

    found = check("sparse_attention_decode", bend, regimes=("ordinary",)).failure
    assert found is not None and found.kind is Kind.WRONG_VALUES
    assert found.detail.startswith("one value everywhere")


def test_the_references_own_result() -> None:
    def bend(eager: Function) -> Function:
        def function(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float) -> None:
            from reference import norms
            from reference.numerics import MODEL

            residual.copy_(norms.residual_add(residual, branch, scale, MODEL))
            out.copy_(norms.rms_norm(residual, weight, 1e-6, MODEL))

        return function

    failure = check("residual_rmsnorm", bend, regimes=("ordinary",)).failure
    assert failure is not None and failure.kind is Kind.CALLS_REFERENCE
    assert "norms.residual_add" in failure.detail


def test_lower_precision_than_the_laws() -> None:
    def bend(eager: Function) -> Function:
        def function(**args: Any) -> None:
            args["state"].copy_(args["state"].bfloat16())
            eager(**args)

        return function

    found = check("lightning_decode", bend, regimes=("ordinary",)).failure
    assert found is not None
    assert found.output == "state"
    assert found.kind in (Kind.WRONG_VALUES, Kind.PADDING_TOUCHED)  # spare slots are rounded as well
    assert torch.isfinite(torch.tensor(float(found.share or 0)))
