"""Variants of key_compression and of the block selection, judged on small workloads of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from workbench.contract import Contract, Workload, contract
from workbench.gate import check
from workbench.gate.judge import judge
from workbench.registry import find

CPU = torch.device("cpu")
SMALL = {"chosen": 12, "local_blocks": 4}
TRITON = {
    "key_compression": ("triton_append", {"batch": 3, "tokens": 70, "context": 210}),
    "sparse_select_decode": ("triton_split", {"batch": 3, "context": 1300, **SMALL}),
    "sparse_select_prefill": ("triton_tiled", {"batch": 3, "tokens": 4, "context": 1300, **SMALL}),
    "sparse_mixer_decode": ("parts_triton", {"batch": 3, "context": 1280, "topk_blocks": 12, "local_blocks": 4}),
}


def run(law: Contract, name: str, sizes: dict[str, int], regime: str, **tunables: Any) -> dict[str, Tensor]:
    """Call a variant, judge every output, return the outputs."""
    args = law.make_inputs(Workload(law.name, law.workload().axes).replace(**sizes), 7, regime, CPU)
    model, oracle = (
        law.reference(reference, args, precision) for precision in (reference.numerics.MODEL, reference.numerics.ORACLE)
    )
    before = {name: args[name].clone() for name in law.outputs}
    find(law.name, name).function(**args, **tunables)
    for output, rule in law.outputs.items():
        verdict = judge(rule, args[output], before[output], model[output], oracle[output])
        assert verdict.kind is None, (regime, output, verdict)
    return {output: args[output] for output in law.outputs}


@pytest.mark.parametrize("op", TRITON)
def test_eager_passes_the_gate(op: str) -> None:
    law = contract(op)
    result = check(law, find(op, "eager"), law.presets["smoke"][1], seeds=(0,), device=CPU)
    assert result.failure is None, result.failure


@pytest.mark.parametrize("regime", ["ordinary", "padded", "strided"])
@pytest.mark.parametrize("op", TRITON)
def test_triton_interpreted(op: str, regime: str) -> None:
    pytest.importorskip("triton")
    name, sizes = TRITON[op]
    run(contract(op), name, sizes, regime)


@pytest.mark.parametrize("regime", ["overflow", "equal", "steps", "stale"])
def test_triton_split_interpreted_at_hard_scores(regime: str) -> None:
    pytest.importorskip("triton")
    run(contract("sparse_select_decode"), "triton_split", {"batch": 1, "context": 1500, **SMALL}, regime)


def test_triton_tiled_interpreted_without_a_window() -> None:
    pytest.importorskip("triton")
    sizes = {"batch": 1, "tokens": 10, "context": 1480, "chosen": 8, "local_blocks": 0}
    run(contract("sparse_select_prefill"), "triton_tiled", sizes, "clusters")


def test_triton_append_gives_the_same_bits_in_one_piece_and_in_pieces() -> None:
    pytest.importorskip("triton")
    function = find("key_compression", "triton_append").function
    law = contract("key_compression")
    args = law.make_inputs(law.workload(batch=1, tokens=200, context=200), 0, "alternating", CPU)
    caches = {name: args[name] for name in law.outputs}
    parts = {name: cache.clone() for name, cache in caches.items()}
    function(**args)
    begin = 0
    for size in (50, 1, 77, 72):
        piece = {"k": args["k"][begin : begin + size], "v": args["v"][begin : begin + size]}
        bounds = torch.tensor([0, size], dtype=torch.int32)
        start = torch.tensor([begin], dtype=torch.int32)
        function(**piece, cu_seqlens=bounds, start=start, block_table=args["block_table"], **parts)
        begin += size
    for name, cache in caches.items():
        assert torch.equal(cache.view(torch.int16), parts[name].view(torch.int16)), name


@pytest.mark.parametrize("op", ["sparse_select_decode", "sparse_select_prefill"])
def test_triton_refuses_what_it_has_no_room_for(op: str) -> None:
    pytest.importorskip("triton")
    supports = find(op, TRITON[op][0]).supports
    assert supports is not None
    assert supports(contract(op).workload()) is None
    reason = supports(contract(op).workload(chosen=20))
    assert reason is not None and "34" in reason
