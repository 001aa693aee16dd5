"""What variants of `linear` and `fused_mlp` do beside passing the gate: repacking, splits, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reference import formats
from reference.numerics import ORACLE
from reference.random import normal
from variants import _dense
from workbench import registry
from workbench.contract import contract

CPU = torch.device("cpu")


@pytest.mark.parametrize("format", ["w4a16", "nvfp4"])
def test_stored_pairs_inputs_64_apart(format: str) -> None:
    registry.interpret_without_gpu()
    stream = pytest.importorskip("variants.linear.triton_stream")
    weight = formats.quantise(format, normal(1, (5, 256)))
    codes = formats.layouts.unpack_nibbles(weight.tensors["packed"].view(torch.uint8))
    stored = stream.stored(weight).codes
    assert stored.shape == (5, 128)
    for group in (0, 1):
        block, original = stored[:, 64 * group : 64 * group + 64], codes[:, 128 * group : 128 * group + 128]
        assert (block & 15).equal(original[:, :64]) and (block >> 4).equal(original[:, 64:])


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({"tokens": 129}, "at most 128 tokens, got 129"),
        ({"format": "fp8_row", "activations": "fp8"}, "quantises no activations"),
        ({"format": "nvfp4", "k": 1040, "n": 100}, "128 inputs a step in nvfp4, got K=1040"),
        ({"format": "bf16", "k": 1040, "n": 100}, None),
    ],
)
def test_stream_says_what_it_cannot_do(axes: dict[str, Any], reason: str | None) -> None:
    law = contract("linear")
    found = registry.find("linear", "triton_stream")
    assert found.supports is not None
    refused = found.supports(law.workload(**axes))
    assert refused is None if reason is None else reason in str(refused)


@pytest.mark.parametrize("split", [1, 2, 4, 16])
def test_splits_agree(split: int) -> None:
    law, found = contract("linear"), registry.find("linear", "triton_stream")
    workload = law.workload(tokens=3, n=40, k=640, format="w8a16")
    args = law.make_inputs(workload, 0, "ordinary", CPU)
    given = registry.prepare(found, workload, args)
    if registry.refusal(found, workload, CPU):
        pytest.skip(str(registry.refusal(found, workload, CPU)))
    found.function(**given, **registry.parameters(found, workload, {"split": split}))
    exact = args["x"].double() @ args["weight"].dequantise().double().T
    assert float((args["out"].double() - exact).norm() / exact.norm()) < 0.003


def test_dense_activations_are_the_law_s() -> None:
    x, w = normal(1, (4, 256), scale=3.0), normal(2, (128, 256))
    for format in ("fp8_row", "fp8_block"):
        weight = formats.quantise(format, w, "fp8")
        seen = _dense.arriving(x, _dense.dense(weight).group)
        assert seen.equal(formats.activations(x, weight).float())
        assert _dense.dense(weight).matrix.equal(weight.dequantise(ORACLE).float())
        assert _dense.dense(formats.quantise(format, w)).group == 0


def test_full_sums_puts_the_setting_back() -> None:
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction
    with pytest.raises(RuntimeError), _dense.full_sums():
        assert not settings.allow_bf16_reduced_precision_reduction
        raise RuntimeError
    assert settings.allow_bf16_reduced_precision_reduction == before


def test_source_hash_covers_what_a_variant_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench import variant

    found = registry.find("fused_mlp", "triton_stream")
    names = [path.relative_to(path.parents[1]).as_posix() for path in variant._sources(found.path)]
    assert names == ["fused_mlp/triton_stream.py", "linear/triton_stream.py"]
    whole = found.source_hash
    monkeypatch.setattr(variant, "_sources", lambda path: [path])
    assert found.source_hash != whole
