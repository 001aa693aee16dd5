"""The contracts of lightning_decode and lightning_prefill: inputs, touched rows, and that pieces are tokens in turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import reference
import reference.lightning
import reference.norms
import reference.rope
from reference.numerics import MODEL, ORACLE
from workbench.contract import Contract, Workload, contract, mutants
from workbench.ops import lightning_decode, lightning_prefill

CPU = torch.device("cpu")
DECODE, PREFILL = lightning_decode.CONTRACT, lightning_prefill.CONTRACT
BOTH = pytest.mark.parametrize("law", [DECODE, PREFILL], ids=["decode", "prefill"])


def _small(law: Contract) -> Workload:
    sizes: dict[str, Any] = {"batch": 4, "heads": 2, "context": 300}
    if law is PREFILL:
        sizes["tokens"] = 9
    return law.workload(**sizes)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


@BOTH
def test_found_by_name_with_every_preset(law: Contract) -> None:
    assert contract(law.name) is law
    assert {"smoke", "long", "race"} < set(law.presets)
    assert any(w["batch"] == 3 for w in law.presets["smoke"]) and any(w["context"] == 63 for w in law.presets["smoke"])
    every = [w for preset in law.presets.values() for w in preset]
    assert max(w["context"] for w in every) == 1 << 21 and max(w["batch"] for w in every) == 128
    for workload in (*every, *law.gate_workloads):
        sizes: dict[str, Any] = dict(workload.axes)
        assert law.workload(**sizes).axes == workload.axes  # all within the ranges


@BOTH
def test_same_seed_same_inputs(law: Contract) -> None:
    for regime in law.regimes:
        one, two = (law.make_inputs(_small(law), 5, regime, CPU) for _ in range(2))
        other = law.make_inputs(_small(law), 6, regime, CPU)
        for name in set(one) - {"out"}:
            assert torch.equal(one[name].nan_to_num(), two[name].nan_to_num()), (regime, name)
        assert not torch.equal(one["qkvz"].nan_to_num(), other["qkvz"].nan_to_num())
        assert list(one) == [*list(law.signature.__annotations__)[: len(one)]]


@BOTH
def test_slots_are_distinct_and_padding_is_full_of_nan(law: Contract) -> None:
    args = law.make_inputs(_small(law), 0, "padded", CPU)
    live = args["slots"][args["slots"] >= 0]
    assert 0 < len(live) < 4 and len(live.unique()) == len(live)
    assert args["qkvz"].isnan().any() and args["state"].isnan().any()


@BOTH
def test_strided_inputs_are_views(law: Contract) -> None:
    args = law.make_inputs(_small(law), 0, "strided", CPU)
    for name in ("qkvz", "state", "out"):
        assert not args[name].is_contiguous() and args[name].stride(-1) == 1


@BOTH
def test_the_law_keeps_its_inputs_and_names_what_it_touches(law: Contract) -> None:
    for regime in law.regimes:
        args = law.make_inputs(_small(law), 1, regime, CPU)
        before = {name: value.clone() for name, value in args.items()}
        model, oracle = (law.reference(reference, args, p) for p in (MODEL, ORACLE))
        for name, value in args.items():
            if value.dtype.is_floating_point:
                assert torch.equal(_bits(value), _bits(before[name])), (regime, name)
        for name in law.outputs:
            touched = model[name].touched
            assert touched is not None and torch.equal(touched, oracle[name].touched)  # type: ignore[arg-type]
            assert model[name].value.shape == args[name].shape == oracle[name].value.shape
            assert oracle[name].value.dtype is torch.float64 and model[name].value.dtype is args[name].dtype
            exact, rounded = oracle[name].value[touched], model[name].value[touched].double()
            assert exact.isfinite().all() and exact.any(), (regime, name)
            assert float((rounded - exact).norm() / exact.norm()) < 0.02, (regime, name)
            if name == "state":
                assert torch.equal(_bits(model[name].value[~touched]), _bits(args[name][~touched]))


@pytest.mark.parametrize("regime", ["ordinary", "ragged", "padded", "fresh"])
def test_prefill_is_decode_token_after_token(regime: str) -> None:
    args = PREFILL.make_inputs(_small(PREFILL), 2, regime, CPU)
    whole = PREFILL.reference(reference, args, MODEL)
    state = args["state"].clone()
    fresh = args["slots"][(args["start"] == 0) & (args["cu_seqlens"].diff() > 0)].long()
    state[fresh] = 0
    bounds = args["cu_seqlens"].tolist()
    for b, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        if args["slots"][b] < 0:
            continue
        for row in range(begin, end):
            step = {
                **{name: args[name] for name in ("q_norm", "k_norm", "o_norm")},
                "qkvz": args["qkvz"][row : row + 1],
                "positions": args["start"][b : b + 1] + row - begin,
                "slots": args["slots"][b : b + 1],
                "state": state,
                "out": args["out"][row : row + 1],
            }
            answer = DECODE.reference(reference, step, MODEL)
            assert torch.equal(answer["out"].value[0], whole["out"].value[row]), (b, row)
            state = answer["state"].value
    touched = whole["state"].touched
    assert touched is not None and torch.equal(state[touched], whole["state"].value[touched])


def test_prefill_splits_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    args = PREFILL.make_inputs(_small(PREFILL), 3, "ragged", CPU)
    whole = PREFILL.reference(reference, args, MODEL)
    monkeypatch.setattr(lightning_prefill, "REFERENCE_TOKENS", 1)
    pieces = PREFILL.reference(reference, args, MODEL)
    for name in PREFILL.outputs:
        assert torch.equal(_bits(whole[name].value), _bits(pieces[name].value))


def test_decode_chunks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    args = DECODE.make_inputs(_small(DECODE), 3, "padded", CPU)
    whole = DECODE.reference(reference, args, MODEL)
    monkeypatch.setattr(lightning_decode, "REFERENCE_ROWS", 1)
    assert torch.equal(whole["out"].value, DECODE.reference(reference, args, MODEL)["out"].value)


def test_costs() -> None:
    one = DECODE.cost(DECODE.workload(batch=1))
    assert one.bytes_read + one.bytes_written == pytest.approx(4 << 20, rel=0.02)  # a state of 2 MiB, both ways
    assert one.flops == 4 * 32 * 128 * 128
    long = PREFILL.cost(PREFILL.workload(batch=1, tokens=8192, context=1 << 20))
    assert (long.bytes_read + long.bytes_written) / 8192 == pytest.approx(40 << 10, rel=0.02)  # q, k, v, z and out
    fresh = PREFILL.cost(PREFILL.workload(batch=1, tokens=8192, context=8192))
    assert long.bytes_read - fresh.bytes_read == 2 << 20


@BOTH
def test_mutants_fit_the_law(law: Contract) -> None:
    folder = Path(reference.__file__).parent
    found = mutants(law.name)
    assert len({m.name for m in found}) == len(found) and sum(not m.allowed for m in found) >= 12
    for mutant in found:
        source = (folder / mutant.file).read_text(encoding="utf-8")
        assert source.count(mutant.old) == 1, mutant.name
        compile(source.replace(mutant.old, mutant.new), mutant.file, "exec")
        assert mutant.caught_by in law.regimes
