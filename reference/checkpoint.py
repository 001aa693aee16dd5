"""A Hugging Face checkpoint folder: config.json and safetensors, in one file or in shards with an index.

Nothing is guessed and nothing is filled in: a tensor that is missing, unexpected, wrongly shaped, wrongly typed,
stored twice or cut off is an error that names the tensor, the file, and what was expected.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .config import SalaConfig, from_json, to_json
from .weights import tensor_shapes

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPE = "BF16"
_LARGEST_HEADER = 100 << 20  # the format's own bound, 100 MB


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as this model; names the tensor, the file, and what was expected."""


@dataclasses.dataclass(frozen=True)
class _Entry:
    """What a safetensors header says of one tensor: where it lies, its type, shape, and bytes past the header."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def load(folder: str | os.PathLike[str], device: torch.device | str = "cpu") -> tuple[SalaConfig, dict[str, Tensor]]:
    """Read configuration and weights (bfloat16, by checkpoint name, on `device`) from `folder`.

    Everything is checked from the headers before the first tensor is read. Raises CheckpointError, or
    `config.ConfigError` for a config.json that asks for another model.
    """
    root = Path(folder)
    if not root.is_dir():
        raise CheckpointError(f"{root}: no such folder")
    config = from_json(root / "config.json")
    entries = _entries(root)
    _check(config, entries, root)
    weights: dict[str, Tensor] = {}
    for file in dict.fromkeys(entry.file for entry in entries.values()):
        with safe_open(file, framework="pt", device=str(device)) as shard:
            for name in shard.keys():  # noqa: SIM118 (the handle is no mapping)
                weights[name] = shard.get_tensor(name)
    return config, {name: weights[name] for name in tensor_shapes(config)}


def save(
    folder: str | os.PathLike[str], config: SalaConfig, weights: Mapping[str, Tensor], shard_bytes: int = 5 << 30
) -> None:
    """Write config.json and `weights`: one file if they fit into `shard_bytes`, else shards and their index."""
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(to_json(config), indent=2) + "\n", encoding="utf-8")
    shards: list[dict[str, Tensor]] = [{}]
    held = 0
    for name in tensor_shapes(config):
        size = weights[name].numel() * weights[name].element_size()
        if shards[-1] and held + size > shard_bytes:
            shards.append({})
            held = 0
        shards[-1][name] = weights[name].contiguous()
        held += size
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = [SINGLE]
    for file, shard in zip(names, shards):
        save_file(shard, root / file, metadata={"format": "pt"})
    if len(shards) > 1:
        places = {name: file for file, shard in zip(names, shards) for name in shard}
        total = sum(w.numel() * w.element_size() for shard in shards for w in shard.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (root / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _entries(root: Path) -> dict[str, _Entry]:
    """Every stored tensor by name, from the headers of the single file or of the index's shards."""
    if not (root / INDEX).exists():
        if not (root / SINGLE).exists():
            raise CheckpointError(f"{root}: holds neither {SINGLE} nor {INDEX}")
        return _header(root / SINGLE)
    places = _weight_map(root / INDEX)
    entries: dict[str, _Entry] = {}
    for file in dict.fromkeys(places.values()):
        if not (root / file).exists():
            first = next(name for name, place in places.items() if place == file)
            raise CheckpointError(f"{first}: expected in shard {file}, which is missing from {root}")
        for name, entry in _header(root / file).items():
            if name in entries:
                raise CheckpointError(f"{name}: stored twice, in {entries[name].file.name} and {file}")
            if places.get(name) != file:
                says = f"in {places[name]}" if name in places else "nowhere"
                raise CheckpointError(f"{name}: lies in {file}, but {INDEX} expects it {says}")
            entries[name] = entry
    for name, file in places.items():
        if name not in entries:
            raise CheckpointError(f"{name}: {INDEX} expects it in {file}, which does not hold it")
    return entries


def _weight_map(path: Path) -> dict[str, str]:
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(file, str) and Path(file).name == file for file in places.values()):
            raise ValueError("a shard is not the name of a file in the folder")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: expected JSON with a weight_map of tensors to files ({error!r})") from None
    return dict(places)


def _header(path: Path) -> dict[str, _Entry]:
    """Read a safetensors header and check that the file holds all the bytes it promises."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= min(_LARGEST_HEADER, size - 8):
            raise CheckpointError(f"{path}: {size} bytes, cut off within its header, or not safetensors")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            header.pop("__metadata__", None)
            data = 8 + length
            entries = {
                name: _Entry(path, facts["dtype"], tuple(facts["shape"]), *(data + at for at in facts["data_offsets"]))
                for name, facts in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: its header is not that of safetensors ({error!r})") from None
    for name, entry in sorted(entries.items(), key=lambda item: item[1].end):
        if entry.end > size:
            held = max(0, size - entry.begin)
            raise CheckpointError(
                f"{name}: cut off; expected {entry.end - entry.begin} bytes of it in {path}, which holds {held}"
            )
    return entries


def _check(config: SalaConfig, entries: Mapping[str, _Entry], root: Path) -> None:
    """Compare the stored tensors with the model's."""
    shapes = tensor_shapes(config)
    for name, shape in shapes.items():
        if name not in entries:
            raise CheckpointError(f"{name}: missing from {root}; expected bfloat16 {list(shape)}")
        entry = entries[name]
        if entry.shape != shape:
            raise CheckpointError(f"{name}: shape {list(entry.shape)} in {entry.file}; expected {list(shape)}")
        if entry.dtype != _DTYPE:
            raise CheckpointError(f"{name}: dtype {entry.dtype} in {entry.file}; expected {_DTYPE}")
        if entry.end - entry.begin != 2 * math.prod(shape):
            raise CheckpointError(
                f"{name}: {entry.end - entry.begin} bytes in {entry.file}; expected {2 * math.prod(shape)}"
            )
    for name, entry in entries.items():
        if name not in shapes:
            raise CheckpointError(f"{name}: unexpected tensor in {entry.file}; the model has none of that name")
