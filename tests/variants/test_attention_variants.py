"""Every attention variant against the oracle, on sizes small enough for Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

import reference
import reference.attention
import reference.numerics
import reference.paging
from workbench import registry
from workbench.contract import contract

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VARIANTS = {
    "sparse_attention_decode": ("eager", "triton_split"),
    "dense_attention_decode": ("eager", "sdpa", "triton_split"),
    "sparse_attention_prefill": ("eager", "triton_union"),
    "dense_attention_prefill": ("eager", "sdpa", "triton_flash"),
}
SIZES = {
    "sparse_attention_decode": ({"batch": 4, "context": 333, "topk_blocks": 3}, {"batch": 1, "context": 64}),
    "dense_attention_decode": ({"batch": 4, "context": 333}, {"batch": 1, "context": 64}),
    "sparse_attention_prefill": (
        {"batch": 4, "tokens": 5, "context": 333, "topk_blocks": 3},
        {"batch": 1, "tokens": 19, "context": 66},
    ),
    "dense_attention_prefill": ({"batch": 4, "tokens": 5, "context": 333}, {"batch": 1, "tokens": 19, "context": 66}),
}
CASES = [(op, name) for op, names in VARIANTS.items() for name in names]


@pytest.mark.parametrize(("op", "name"), CASES)
def test_variant_agrees_with_the_oracle_in_every_regime(op: str, name: str) -> None:
    law, variant = contract(op), registry.find(op, name)
    reason = registry.refusal(variant, None, DEVICE)
    if reason is not None:
        pytest.skip(reason)
    for size in SIZES[op]:
        workload = law.workload("custom", **size)
        for regime in law.regimes if size["batch"] > 1 else law.regimes[:1]:
            args = law.make_inputs(workload, 0, regime, DEVICE)
            args["out"].fill_(float("nan"))
            kept = {key: value.clone() for key, value in args.items() if key != "out"}
            variant.function(**args, **registry.parameters(variant, workload, {}))
            model = law.reference(reference, args, reference.numerics.MODEL)["out"]
            oracle = law.reference(reference, args, reference.numerics.ORACLE)["out"]
            live = oracle.touched
            assert live is not None
            error = (args["out"][live].double() - oracle.value[live]).norm()
            own = (model.value[live].double() - oracle.value[live]).norm()
            assert error <= 1.6 * own, (size, regime)
            assert torch.isnan(args["out"][~live]).all(), "padding was written"
            for key, value in kept.items():
                assert torch.equal(value.nan_to_num(), args[key].nan_to_num()), f"{key} was changed"


@pytest.mark.parametrize("splits", [1, 2, 8, 48])
def test_splits_do_not_show_in_the_result(splits: int) -> None:
    for op in ("sparse_attention_decode", "dense_attention_decode"):
        law, variant = contract(op), registry.find(op, "triton_split")
        reason = registry.refusal(variant, None, DEVICE)
        if reason is not None:
            pytest.skip(reason)
        if splits not in variant.tunables["splits"]:
            continue
        workload = law.workload(batch=2, context=200)
        args = law.make_inputs(workload, 0, "needle", DEVICE)
        variant.function(**args, **registry.parameters(variant, workload, {"splits": splits}))
        oracle = law.reference(reference, args, reference.numerics.ORACLE)["out"].value
        assert (args["out"].double() - oracle).norm() <= 5e-3 * oracle.norm()
