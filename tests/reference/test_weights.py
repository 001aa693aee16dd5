"""Seeded weights: names and sizes of the released checkpoint, and bits that depend on seed and name alone."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from reference.config import preset
from reference.weights import parameter_count, seeded_tensor, seeded_weights, tensor_shapes

TINY = preset("sala-tiny")
BITS = "2e86e57bff1400a288cb7163ec46c9e4b8498d81c77833eb92e1150366c9adb3"


def _digest(tensors: dict[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name, tensor in tensors.items():
        total.update(name.encode() + tensor.cpu().contiguous().view(torch.int16).numpy().tobytes())
    return total.hexdigest()


def test_released_sizes_are_counted_without_allocating() -> None:
    shapes = tensor_shapes(preset("sala-9b"))
    assert len(shapes) == 395
    assert parameter_count(preset("sala-9b")) == 9_477_203_968
    assert shapes["model.layers.0.self_attn.o_gate.weight"] == (4096, 4096)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (256, 4096)
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (4096, 4096)
    assert shapes["model.layers.1.self_attn.q_norm.weight"] == (128,)
    assert shapes["model.layers.1.self_attn.o_norm.weight"] == (4096,)
    assert "model.layers.0.self_attn.q_norm.weight" not in shapes
    assert "model.layers.1.self_attn.o_gate.weight" not in shapes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bits_are_fixed(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    assert _digest(seeded_weights(TINY, 0, device)) == BITS


def test_a_tensor_does_not_depend_on_what_is_made_before_it() -> None:
    names = list(tensor_shapes(TINY))
    backwards = {name: seeded_tensor(TINY, 3, name) for name in reversed(names)}
    assert _digest({name: backwards[name] for name in names}) == _digest(seeded_weights(TINY, 3))


def test_each_seed_and_each_tensor_has_its_own_stream() -> None:
    def start(seed: int, name: str) -> tuple[float, ...]:
        return tuple(seeded_tensor(TINY, seed, f"model.layers.{name}_proj.weight").flatten()[:8].tolist())

    names = [f"{layer}.self_attn.{part}" for layer in (1, 2) for part in "qkvz"]
    assert len({start(seed, name) for seed in (0, 1) for name in names}) == 16


def test_sizes_keep_a_unit_input_at_unit_size() -> None:
    for name, std in (
        ("model.embed_tokens.weight", 0.1),
        ("model.layers.1.self_attn.q_proj.weight", 1 / 16),
        ("model.layers.0.self_attn.q_proj.weight", 2 / 16),
        ("model.layers.0.self_attn.o_proj.weight", 1 / 64),
        ("model.layers.0.mlp.down_proj.weight", 512**-0.5),
    ):
        weight = seeded_tensor(TINY, 0, name).double()
        assert weight.std() == pytest.approx(std, rel=0.02)
        assert abs(weight.mean()) < 0.01 * std * 3
    norm = seeded_tensor(TINY, 0, "model.layers.1.self_attn.o_norm.weight").double()
    assert norm.mean() == pytest.approx(1.0, abs=0.01)
    assert norm.std() == pytest.approx(0.1, rel=0.1)


def test_unknown_tensor_is_refused() -> None:
    with pytest.raises(KeyError, match=r"model\.layers\.0\.self_attn\.z_proj\.weight"):
        seeded_tensor(TINY, 0, "model.layers.0.self_attn.z_proj.weight")
