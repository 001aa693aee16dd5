"""What the four attention contracts promise of their inputs, costs and mutants."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import reference
import reference.attention
import reference.numerics
import reference.paging
from workbench.attention import KEY_FLOPS, PAGE, choose_blocks, distinct_blocks
from workbench.contract import Contract, contract, mutants

CPU = torch.device("cpu")
OPS = ("sparse_attention_decode", "sparse_attention_prefill", "dense_attention_decode", "dense_attention_prefill")
SPARSE = OPS[:2]


def _small(law: Contract, **axes: int) -> Any:
    sizes = {"batch": 4, "context": 700, "tokens": 70, "topk_blocks": 4}
    return law.workload("custom", **{name: value for name, value in {**sizes, **axes}.items() if name in law.axes})


def _spans(args: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """First row, end row and keys of each sequence, −1 for padding."""
    if "lengths" in args:
        return [(b, b + 1, n) for b, n in enumerate(args["lengths"].tolist())]
    cuts, starts = args["cu_seqlens"].tolist(), args["start"].tolist()
    return [(cuts[b], cuts[b + 1], -1 if s < 0 else s + cuts[b + 1] - cuts[b]) for b, s in enumerate(starts)]


@pytest.mark.parametrize("op", OPS)
def test_every_regime_fits_the_signature_and_repeats_by_seed(op: str) -> None:
    law = contract(op)
    for regime in law.regimes:
        workload = _small(law)
        args = law.make_inputs(workload, 3, regime, CPU)
        assert list(args) == list(inspect.signature(law.signature).parameters)
        again = law.make_inputs(workload, 3, regime, CPU)
        other = law.make_inputs(workload, 4, regime, CPU)
        for name, value in args.items():
            assert value.stride(-1) == 1
            if name != "out":
                same = value.nan_to_num() if value.is_floating_point() else value
                assert torch.equal(same, again[name].nan_to_num() if value.is_floating_point() else again[name])
        assert not torch.equal(args["q"].nan_to_num(), other["q"].nan_to_num())


@pytest.mark.parametrize("op", OPS)
def test_only_what_belongs_to_a_sequence_is_finite(op: str) -> None:
    law = contract(op)
    for regime in ("ordinary", "ragged", "padded", "strided"):
        args = law.make_inputs(_small(law), 0, regime, CPU)
        for name in ("k_cache", "v_cache"):
            owned = torch.zeros(args[name].shape[0], PAGE, dtype=torch.bool)
            for b, (_, _, count) in enumerate(_spans(args)):
                for block in range(-(-max(count, 0) // PAGE)):
                    page = int(args["block_table"][b, block])
                    assert page >= 0
                    assert not owned[page].any(), "a page belongs to two"
                    owned[page, : min(PAGE, count - block * PAGE)] = True
            assert torch.equal(torch.isfinite(args[name]).all(-1).all(1), owned)
            assert torch.equal(torch.isnan(args[name]).all(-1).all(1), ~owned)


@pytest.mark.parametrize("op", OPS)
def test_the_law_is_finite_and_leaves_padding(op: str) -> None:
    law = contract(op)
    for regime in law.regimes:
        args = law.make_inputs(_small(law, context=200, tokens=20), 1, regime, CPU)
        model = law.reference(reference, args, reference.numerics.MODEL)["out"]
        oracle = law.reference(reference, args, reference.numerics.ORACLE)["out"]
        live = torch.zeros(len(args["q"]), dtype=torch.bool)
        for first, end, count in _spans(args):
            live[first:end] = count >= 0
        assert model.touched is not None
        assert torch.equal(model.touched, live)
        assert (regime == "padded") == (not live.all())
        assert torch.isfinite(model.value[live]).all()
        assert (oracle.value[live].norm(dim=1) > 0).all()
        error = (model.value[live].double() - oracle.value[live]).norm() / oracle.value[live].norm()
        assert 0 < error < 4e-3


def test_pieces_start_inside_blocks_and_at_zero() -> None:
    law = contract("dense_attention_prefill")
    starts = law.make_inputs(_small(law, batch=6), 0, "ragged", CPU)["start"]
    assert (starts == 0).any()
    assert (starts % PAGE != 0).any()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 12, 96])
@pytest.mark.parametrize("regime", ["ordinary", "few"])
def test_chosen_blocks_are_what_a_selection_leaves(count: int, regime: str) -> None:
    position = torch.tensor([0, 63, 64, 200, 1000, 6143, 6144, 6200, 8191, 8192, 100_000, 1 << 20])
    blocks = choose_blocks("test", 0, regime, torch.arange(len(position)), position, count, 50).long()
    own = position[:, None] // PAGE
    assert blocks.shape == (len(position), 2, count)
    used = blocks >= 0
    assert (used[..., 1:] <= used[..., :-1]).all(), "−1 only in the tail"
    assert ((blocks[..., 1:] > blocks[..., :-1]) | ~used[..., 1:]).all(), "ascending"
    assert torch.equal(blocks.amax(-1), own.expand(-1, 2)), "the token's own block is among them"
    if regime == "ordinary":
        assert torch.equal(used.sum(-1), (own + 1).clamp(max=count).expand(-1, 2))
        far = own[:, 0] >= count
        for back in range(count // 3 + 1 if count > 1 else 1):
            assert (blocks[far] == own[far, :, None] - back).any(-1).all(), "the window"
        assert count == 1 or (blocks[..., 0] == 0).all()


def test_overlap_is_what_was_asked_for() -> None:
    position = torch.arange(1_000_000, 1_000_000 + 64)
    for overlap in (0, 87, 100):
        blocks = choose_blocks("test", 0, "ordinary", torch.zeros_like(position), position, 96, overlap)
        free = blocks[:, :, 1:63].unflatten(0, (8, 8))
        same = (free == free[:, :1])[:, 1:].float().mean()
        assert abs(float(same) - overlap / 100) < 0.08


@pytest.mark.parametrize("overlap", [0, 87, 100])
def test_distinct_blocks_is_what_is_drawn(overlap: int) -> None:
    keys, tokens = 60_000, 100
    position = torch.arange(keys - tokens, keys)
    blocks = choose_blocks("test", 0, "ordinary", torch.zeros_like(position), position, 96, overlap)
    drawn = sum(len(blocks[:, head].unique()) for head in range(2)) / 2
    assert abs(distinct_blocks(keys, tokens, 96, overlap) - drawn) < 0.06 * drawn


def test_unchosen_blocks_are_nan_and_chosen_ones_are_not() -> None:
    law = contract("sparse_attention_prefill")
    args = law.make_inputs(_small(law, tokens=5), 0, "unchosen", CPU)
    for b, (first, end, count) in enumerate(_spans(args)):
        for head in range(2):
            chosen = set(args["blocks"][first:end, head].flatten().tolist()) - {-1}
            assert len(chosen) < -(-count // PAGE)
            for block in range(-(-count // PAGE)):
                rows = args["k_cache"][args["block_table"][b, block], head, : min(PAGE, count - block * PAGE)]
                assert bool(torch.isfinite(rows).all()) == (block in chosen)


@pytest.mark.parametrize("op", OPS)
def test_cost_counts_the_keys_seen(op: str) -> None:
    law = contract(op)
    workload = _small(law, batch=1)
    args = law.make_inputs(workload, 0, "ordinary", CPU)
    ((first, end, count),) = _spans(args)
    seen = 0
    for row in range(first, end):
        position = count - (end - row)
        if "blocks" not in args:
            seen += 2 * (position + 1)
            continue
        for block in args["blocks"][row].flatten().tolist():
            seen += max(0, min(PAGE, position + 1 - block * PAGE)) if block >= 0 else 0
    cost = law.cost(workload)
    assert cost.flops == seen * KEY_FLOPS // 2
    assert cost.bytes_written == args["out"].numel() * 2
    assert cost.bytes_read > 0


@pytest.mark.parametrize("op", OPS)
def test_presets_reach_the_sizes_that_are_promised(op: str) -> None:
    law = contract(op)
    sizes = [w for preset in law.presets.values() for w in preset] + list(law.gate_workloads)
    assert {w["batch"] for w in sizes} >= {1, 3, 8, 32}
    contexts = {w["context"] for w in sizes}
    assert contexts >= {1, 63, 64, 65, 127, 128, 8191, 8192, 8193, 1 << 20, 1 << 21}
    if op in SPARSE:
        assert contexts >= {6143, 6144, 6145}
    if "tokens" in law.axes:
        assert max(w["tokens"] for w in sizes) == 16384
    assert {"smoke", "long", "race"} <= set(law.presets)
    for workload in sizes:
        assert law.cost(workload).flops > 0


@pytest.mark.parametrize("op", OPS)
def test_each_mutant_patches_one_place(op: str) -> None:
    law, found = contract(op), mutants(op)
    assert sum(not mutant.allowed for mutant in found) >= 12
    assert len({mutant.name for mutant in found}) == len(found)
    for mutant in found:
        source = (Path(reference.__file__).parent / mutant.file).read_text()
        assert source.count(mutant.old) == 1, mutant.name
        assert mutant.new != mutant.old
        assert mutant.caught_by in law.regimes
