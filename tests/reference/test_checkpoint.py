"""Checkpoint folders: what is written reads back to the bit, and every flaw names its tensor and file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reference.checkpoint import INDEX, SINGLE, CheckpointError, load, save
from reference.config import LIGHTNING, SPARSE, ConfigError, SalaConfig, preset
from reference.weights import seeded_weights, tensor_shapes

CONFIG: SalaConfig = dataclasses.replace(
    preset("sala-tiny"),
    hidden_size=32,
    intermediate_size=48,
    vocab_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    lightning_heads=2,
    mixer_types=(SPARSE, LIGHTNING),
)
UP = "model.layers.0.mlp.up_proj.weight"
Edit = Callable[[dict[str, torch.Tensor]], object]


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save(tmp_path, CONFIG, seeded_weights(CONFIG, 2))
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save(tmp_path, CONFIG, seeded_weights(CONFIG, 2), shard_bytes=8000)
    return tmp_path


def _places(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def _edit(file: Path, edit: Edit) -> None:
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize("shard_bytes", [1 << 30, 8000, 1])
def test_round_trip_keeps_every_bit(tmp_path: Path, shard_bytes: int) -> None:
    weights = seeded_weights(CONFIG, 2)
    save(tmp_path, CONFIG, weights, shard_bytes=shard_bytes)
    files = {"single": 1, "shards": len(list(tmp_path.glob("*.safetensors")))}
    assert files["shards"] == (1 if shard_bytes == 1 << 30 else len(set(_places(tmp_path).values())))
    config, loaded = load(tmp_path)
    assert config == CONFIG
    assert list(loaded) == list(tensor_shapes(CONFIG))
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    assert {w.dtype for w in loaded.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(UP), rf"^{UP}: missing from .*expected bfloat16 \[48, 32\]"),
        (lambda t: t.update({UP: t[UP].T.contiguous()}), rf"^{UP}: shape \[32, 48\] in .*{SINGLE}; .* \[48, 32\]"),
        (lambda t: t.update({UP: t[UP].half()}), rf"^{UP}: dtype F16 in .*{SINGLE}; expected BF16"),
        (lambda t: t.update({UP: t[UP].float()}), rf"^{UP}: dtype F32 in .*; expected BF16"),
        (lambda t: t.update({"inv_freq": t[UP][0].clone()}), rf"^inv_freq: unexpected tensor in .*{SINGLE}"),
    ],
)
def test_flaw_names_tensor_file_and_what_was_expected(single: Path, edit: Edit, message: str) -> None:
    _edit(single / SINGLE, edit)
    with pytest.raises(CheckpointError, match=message):
        load(single)


@pytest.mark.parametrize("left", [0, 4, 8, 100])
def test_file_cut_off_in_its_header_is_named(single: Path, left: int) -> None:
    file = single / SINGLE
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(CheckpointError, match=rf"{SINGLE}: {left} bytes"):
        load(single)


def test_file_cut_off_in_its_data_names_the_tensor(single: Path) -> None:
    file = single / SINGLE
    raw = file.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    header.pop("__metadata__", None)
    last = max(header, key=lambda name: header[name]["data_offsets"][1])
    begin, end = header[last]["data_offsets"]
    file.write_bytes(raw[:-2])
    size = end - begin
    with pytest.raises(CheckpointError, match=rf"^{last}: cut off; expected {size} bytes .* holds {size - 2}"):
        load(single)


def test_other_bytes_are_not_taken_for_a_checkpoint(single: Path) -> None:
    (single / SINGLE).write_bytes((8).to_bytes(8, "little") + b'{"a": 1}' + bytes(100))
    with pytest.raises(CheckpointError, match="its header is not that of safetensors"):
        load(single)


def test_missing_shard_is_named_with_a_tensor_it_should_hold(sharded: Path) -> None:
    file = _places(sharded)[UP]
    (sharded / file).unlink()
    with pytest.raises(CheckpointError, match=rf"expected in shard {file}, which is missing"):
        load(sharded)


def test_cut_off_shard_names_tensor_and_shard(sharded: Path) -> None:
    file = sharded / _places(sharded)[UP]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"cut off; expected \d+ bytes .*{file.name}"):
        load(sharded)


def test_shard_without_a_tensor_of_the_index(sharded: Path) -> None:
    file = _places(sharded)[UP]
    _edit(sharded / file, lambda t: t.pop(UP))
    with pytest.raises(CheckpointError, match=rf"^{UP}: .*expects it in {file}, which does not hold it"):
        load(sharded)


def test_tensor_in_another_shard_than_the_index_says(sharded: Path) -> None:
    places = _places(sharded)
    other = next(file for file in places.values() if file != places[UP])
    _edit(sharded / other, lambda t: t.update({UP: torch.zeros(48, 32).bfloat16()}))
    with pytest.raises(CheckpointError, match=rf"^{UP}: (stored twice|lies in {other}, but)"):
        load(sharded)
    _edit(sharded / other, lambda t: (t.pop(UP), t.update({"extra": torch.zeros(2).bfloat16()})))
    with pytest.raises(CheckpointError, match=rf"^extra: lies in {other}, but .* nowhere"):
        load(sharded)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": "../b.safetensors"}}'])
def test_broken_index_is_named(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json: expected JSON with a weight_map"):
        load(sharded)


def test_folder_without_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        load(tmp_path / "absent")
    with pytest.raises(ConfigError, match="config"):
        load(tmp_path)
    save(tmp_path, CONFIG, seeded_weights(CONFIG, 2))
    (tmp_path / SINGLE).unlink()
    with pytest.raises(CheckpointError, match=f"neither {SINGLE} nor {INDEX}"):
        load(tmp_path)
