"""The contract of residual_rmsnorm: every mutant dies, every constant has a case in which it bites."""

from __future__ import annotations

import pytest
import torch

import reference
from reference.numerics import MODEL, ORACLE
from workbench.contract import contract, mutants
from workbench.gate.selftest import selftest

CONTRACT = contract("residual_rmsnorm")
CPU = torch.device("cpu")


def test_every_mutant_dies_and_the_law_passes() -> None:
    made = mutants("residual_rmsnorm")
    assert len({mutant.name for mutant in made if not mutant.allowed}) >= 10
    outcomes = selftest(CONTRACT)
    failed = [f"{o.group} {o.name}: {o.note or o.ought}" for o in outcomes if not o.ok]
    assert not failed
    elsewhere = [o.name for o in outcomes if o.group == "mutant" and o.by is not None and o.by.regime != o.ought]
    assert not elsewhere  # each was caught where its file says


def test_eps_bites_where_inputs_are_tiny() -> None:
    args = CONTRACT.make_inputs(CONTRACT.workload(tokens=4, hidden=512), 0, "tiny", CPU)
    mean_square = args["residual"].double().square().mean()
    assert 1e-7 < mean_square < 1e-5  # eps is 1e-6


def test_reference_leaves_its_arguments_and_takes_rows_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = CONTRACT.workload(tokens=7, hidden=64)
    args = CONTRACT.make_inputs(workload, 0, "strided", CPU)
    before = {name: value.clone() for name, value in args.items() if isinstance(value, torch.Tensor)}
    whole = {precision: CONTRACT.reference(reference, args, precision) for precision in (MODEL, ORACLE)}
    monkeypatch.setattr("workbench.ops.residual_rmsnorm.REFERENCE_ELEMENTS", 128)
    for precision, expected in whole.items():
        parts = CONTRACT.reference(reference, args, precision)
        for name in CONTRACT.outputs:
            assert torch.equal(parts[name].value, expected[name].value)
    for name in ("branch", "residual", "weight"):
        assert torch.equal(args[name], before[name])


def test_strided_rows_hold_the_same_values_further_apart() -> None:
    workload = CONTRACT.workload(tokens=5, hidden=96)
    strided = CONTRACT.make_inputs(workload, 3, "strided", CPU)
    assert [strided[name].stride(0) for name in ("branch", "residual", "out")] == [160, 104, 224]
    assert strided["branch"].isfinite().all()


def test_presets_cover_every_size() -> None:
    tokens = {workload["tokens"] for preset in CONTRACT.presets.values() for workload in preset}
    assert {1, 3, 8, 32, 63, 128, 8192, 16384} <= tokens
    moved = CONTRACT.cost(CONTRACT.workload(tokens=128))
    assert (moved.flops, moved.bytes_read, moved.bytes_written) == (0.0, 2 * 128 * 8192 + 8192, 2 * 128 * 8192)
