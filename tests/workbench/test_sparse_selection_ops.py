"""Contracts of key_compression, sparse_select_decode, sparse_select_prefill and sparse_mixer_decode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from reference.numerics import MODEL, ORACLE
from workbench import histories
from workbench.contract import Contract, Workload, contract, mutants
from workbench.gate.judge import judge
from workbench.ops import key_compression, sparse_mixer_decode, sparse_select_decode, sparse_select_prefill
from workbench.ops.sparse_select_prefill import visible_rows

CPU = torch.device("cpu")
COMPRESS, DECODE = key_compression.CONTRACT, sparse_select_decode.CONTRACT
PREFILL, MIXER = sparse_select_prefill.CONTRACT, sparse_mixer_decode.CONTRACT
ALL = pytest.mark.parametrize("law", [COMPRESS, DECODE, PREFILL, MIXER], ids=lambda law: law.name)


def small(law: Contract) -> Workload:
    """Four sequences, short enough for seconds, long enough that blocks are left out."""
    sizes: dict[str, Any] = {"batch": 4, "context": 1400}
    if "tokens" in law.axes:
        sizes["tokens"] = 20
    if "local_blocks" in law.axes:
        sizes |= {"local_blocks": 4, "chosen" if "chosen" in law.axes else "topk_blocks": 12}
    return law.workload(**sizes)


def same(a: Any, b: Any) -> bool:
    """Equal, NaN counting as equal to NaN."""
    if not isinstance(a, Tensor):
        return bool(a == b)
    if a.is_floating_point():
        return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))
    return torch.equal(a, b)


@ALL
def test_presets_reach_every_size(law: Contract) -> None:
    assert contract(law.name) is law
    every = [w for preset in law.presets.values() for w in preset]
    assert max(w["context"] for w in every) == 1 << 21 and max(w["batch"] for w in every) == 128
    if "tokens" in law.axes:
        assert max(w["tokens"] for w in every) == 1 << 14
    for workload in (*every, *law.gate_workloads):
        sizes: dict[str, Any] = dict(workload.axes)
        assert law.workload(**sizes).axes == workload.axes
        spent = law.cost(workload)
        assert spent.bytes_read > 0 and spent.bytes_written > 0 and spent.flops >= 0


@ALL
def test_same_seed_same_inputs_and_the_law_writes_to_none(law: Contract) -> None:
    outputs = {name for name, output in law.outputs.items() if not output.inout}
    for regime in law.regimes:
        one, two = (law.make_inputs(small(law), 5, regime, CPU) for _ in range(2))
        law.reference(reference, two, MODEL)
        assert list(one) == [*law.signature.__annotations__][: len(one)]
        for name in set(one) - outputs:
            assert same(one[name], two[name]), (regime, name)


@ALL
@pytest.mark.parametrize("regime", ["padded", "strided", "ragged"])
def test_the_law_passes_and_padding_is_untouched(law: Contract, regime: str) -> None:
    args = law.make_inputs(small(law), 1, regime, CPU)
    model, oracle = (law.reference(reference, args, precision) for precision in (MODEL, ORACLE))
    for name, output in law.outputs.items():
        touched, value = model[name].touched, model[name].value.to(args[name].dtype)
        assert touched is not None
        before = args[name].contiguous().clone() if output.inout else torch.zeros_like(value)
        mask = touched.reshape(*touched.shape, *[1] * (value.ndim - touched.ndim))
        assert judge(output, torch.where(mask, value, before), before, model[name], oracle[name]).kind is None
        if regime == "padded" and not output.inout:
            assert not bool(touched.all()) and bool(touched.any())


@ALL
def test_every_mutant_fits_the_reference(law: Contract) -> None:
    found = mutants(law.name)
    assert sum(not mutant.allowed for mutant in found) >= 12
    assert len({mutant.name for mutant in found}) == len(found)
    for mutant in found:
        source = (Path(reference.__path__[0]) / mutant.file).read_text()
        assert source.count(mutant.old) == 1, mutant.name
        assert mutant.caught_by in law.regimes, mutant.name


def test_garbage_lies_in_every_row_that_is_not_complete() -> None:
    for regime, is_garbage in (("ordinary", Tensor.isnan), ("stale", lambda x: x == 40.0)):
        args = DECODE.make_inputs(DECODE.workload(batch=1, context=1000), 0, regime, CPU)
        pages = args["block_table"][0, :16].long()
        fine = args["k1_cache"][pages][..., 0].transpose(1, 2).flatten(0, 1)
        coarse = args["k2_cache"][pages][..., 0]
        assert bool(is_garbage(fine[61:]).all()) and not bool(is_garbage(fine[:61]).any())
        assert bool(is_garbage(coarse[14:]).all()) and not bool(is_garbage(coarse[:14]).any())
        assert len(set(pages.tolist())) == 16 and pages.tolist() != sorted(pages.tolist())


@pytest.mark.parametrize("extra", ["fine", "coarse"])
def test_a_row_read_too_far_is_caught(extra: str) -> None:
    """A variant that counts one compressed key more than is complete reads what a former sequence left."""
    caught = set()
    for regime in ("ordinary", "stale"):
        # The last window but the own block's straddles into a free block only without a local window.
        workload = DECODE.workload(batch=1, context=1480, chosen=8, local_blocks=0)
        args = DECODE.make_inputs(workload, 0, regime, CPU)
        n, table = 1480, args["block_table"][0]
        k1 = reference.paging.gather(args["k1_cache"], table, n // 16 - 1 + (extra == "fine"))
        k2 = reference.paging.gather(args["k2_cache"], table, n // 64 - 1 + (extra == "coarse"))
        q = args["q"].double().reshape(2, 16, 128) / 128**0.5
        normaliser = torch.logsumexp(q @ k2.double().permute(1, 2, 0), -1, keepdim=True)
        scores = (q @ k1.double().permute(1, 2, 0) - normaliser).exp().sum(1, keepdim=True).transpose(0, 1)
        pooled = reference.selection.pool(scores.transpose(0, 1), torch.tensor([n - 1]), 24, 1, 0)
        blocks = reference.selection.choose(pooled.nan_to_num(0.0, torch.inf), torch.tensor([n - 1]), 8)
        expected = DECODE.reference(reference, args, MODEL)["blocks"]
        got = blocks.transpose(0, 1).contiguous()
        if judge(DECODE.outputs["blocks"], got, torch.zeros_like(got), expected).kind is not None:
            caught.add(regime)
    assert caught


@pytest.mark.parametrize("regime", DECODE.regimes)
def test_selection_facts_say_what_is_forced_and_how_many(regime: str) -> None:
    workload = DECODE.workload(batch=3, context=1400, chosen=12, local_blocks=4)
    args = DECODE.make_inputs(workload, 2, regime, CPU)
    expected = DECODE.reference(reference, args, ORACLE)["blocks"]
    scores, count = expected.facts["scores"], expected.facts["count"]
    for row, n in enumerate(args["lengths"].tolist()):
        if n < 0:
            assert expected.touched is not None and not bool(expected.touched[row])
            continue
        own = (n - 1) // 64
        forced = {0, *range(max(0, own - 4), own + 1)}
        for group in range(2):
            line = scores[row, group]
            assert set(torch.nonzero(line == torch.inf).flatten().tolist()) == forced
            assert bool((line[own + 1 :] == -torch.inf).all()) and bool((line[: own + 1] > 0).all())
            assert int(count[row, group]) == min(12, own + 1)


def test_regimes_are_what_they_say() -> None:
    def free_scores(regime: str) -> Tensor:
        args = DECODE.make_inputs(DECODE.workload(batch=1, context=8193), 0, regime, CPU)
        line = DECODE.reference(reference, args, ORACLE)["blocks"].facts["scores"][0, 0]
        return line[line.isfinite()].sort(descending=True).values

    assert bool((free_scores("equal") / free_scores("equal")[0] - 1).abs().max() < 1e-12)
    assert float(free_scores("flat")[0] / free_scores("flat")[-1]) < 1.5
    assert float(free_scores("ordinary")[0] / free_scores("ordinary")[-1]) > 10
    assert int((free_scores("overflow") >= 2.0**112).sum()) > 62
    levels = free_scores("ties")
    assert len(levels.unique()) < 30 and float(levels[61] / levels[62]) == pytest.approx(1.0, abs=1e-12)
    steps = free_scores("steps")
    assert 1.0 < float((steps[:-1] / steps[1:]).median()) < 1.02


def test_prefill_facts_are_decodes_at_every_position() -> None:
    args = PREFILL.make_inputs(
        PREFILL.workload(batch=1, tokens=70, context=1470, chosen=12, local_blocks=4), 3, "recent", CPU
    )
    whole = PREFILL.reference(reference, args, MODEL)["blocks"]
    for token in range(0, 70, 9):
        n = 1400 + token + 1
        alone = {
            "q": args["q"][token : token + 1],
            "lengths": torch.tensor([n], dtype=torch.int32),
            "blocks": args["blocks"][:1],
            **{name: args[name] for name in ("block_table", "k1_cache", "k2_cache", "init_blocks", "local_blocks")},
        }
        assert torch.equal(DECODE.reference(reference, alone, MODEL)["blocks"].value[0], whole.value[token])


def test_visible_rows_is_the_sum_over_positions() -> None:
    for start, tokens in ((0, 1), (0, 500), (37, 200), (126, 3), (6000, 77)):
        for stride in (16, 64):
            wanted = sum(max(0, (p + 1) // stride - 1) for p in range(start, start + tokens))
            assert visible_rows(start, tokens, stride) == wanted


def test_a_long_history_of_key_compression_costs_no_memory() -> None:
    args = COMPRESS.make_inputs(COMPRESS.workload(batch=3, tokens=1, context=1 << 21), 0, "ordinary", CPU)
    assert args["k_cache"].shape[0] < 32 and args["block_table"].shape[1] > 1 << 15
    model = COMPRESS.reference(reference, args, MODEL)
    for name in ("k1_cache", "k2_cache"):
        touched = model[name].touched
        assert touched is not None and int(touched.sum()) == 3 * 2


@pytest.mark.parametrize("regime", ["ordinary", "sharp"])
def test_rounding_never_decides_a_choice_of_the_mixer(regime: str) -> None:
    args = MIXER.make_inputs(MIXER.workload(batch=1, context=2500, topk_blocks=12, local_blocks=4), 0, regime, CPU)
    q, _, _, _ = sparse_mixer_decode.split(args["qkvg"])
    table, n = args["block_table"][0], 2499
    line = (
        reference.selection.block_scores(
            q,
            reference.paging.gather(args["k1_cache"], table, n // 16 - 1),
            reference.paging.gather(args["k2_cache"], table, n // 64 - 1),
            torch.tensor([n - 1]),
            40,
            init_blocks=1,
            local_blocks=4,
            precision=ORACLE,
        )[:, 0]
        .sort(descending=True)
        .values
    )
    assert bool((line[:, 11] > 1.5 * line[:, 12]).all())


def test_strided_views_keep_contents_and_the_last_dimension_dense() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    view = histories.strided(x)
    assert torch.equal(view, x) and view.stride(-1) == 1 and not view.is_contiguous()
