"""Attention over chosen blocks, against what the authors' CUDA kernel answered (all seven sparse files)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from reference.attention import attend_blocks
from reference.numerics import MODEL

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = sorted(path.stem for path in GOLDEN.glob("sparse_*.safetensors"))


def _make(seed: int, shape: tuple[int, ...], scale: float, structure: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * scale
    if structure == "repeat256":
        x = x[:256].repeat((shape[0] // 256 + 1,) + (1,) * (len(shape) - 1))[: shape[0]]
    elif structure == "smooth":
        coarse = torch.randn((shape[0] // 97 + 1, *shape[1:]), generator=generator) * scale * 1.5
        x = 0.3 * x + coarse.repeat_interleave(97, 0)[: shape[0]]
    return x.to(torch.bfloat16)


def _digest(x: Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def test_all_seven_files_are_there() -> None:
    assert len(FILES) == 7


@pytest.mark.parametrize("name", FILES)
def test_attention_agrees_with_the_released_kernel(name: str) -> None:
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        recipe = json.loads(file.metadata()["recipe"])
        rows, blocks, want = (file.get_tensor(key) for key in ("rows", "topk_idx", "out"))
    lens, structure = recipe["lens"], recipe["structure"]
    queries = len(lens) if recipe["decode"] else sum(lens)
    seed, scale = recipe["seed"], recipe["scale"]
    q = _make(seed, (queries, 32, 128), scale, "iid" if structure == "repeat256" else structure)
    k = _make(seed + 1, (sum(lens), 2, 128), scale, structure)
    v = _make(seed + 2, (sum(lens), 2, 128), 1.0, "iid")
    assert {"q": _digest(q), "k": _digest(k), "v": _digest(v)} == recipe["sha256"]

    blocks = blocks.transpose(0, 1)
    got = torch.zeros(want.shape, dtype=torch.float64)
    checked = first_key = first_query = 0
    for length in lens:
        count = 1 if recipe["decode"] else length
        here = (rows >= first_query) & (rows < first_query + count)
        local = rows[here] - first_query
        positions = torch.full_like(local, length - 1) if recipe["decode"] else local
        keys = slice(first_key, first_key + length)
        got[here] = attend_blocks(q[rows[here]], k[keys], v[keys], blocks[here], positions, MODEL).double()
        checked += len(local)
        first_key += length
        first_query += count
    assert checked == len(rows)
    difference, answer = (got - want.double()).flatten(1), want.double().flatten(1)
    assert difference.norm() <= 2.5e-3 * answer.norm()
    assert (difference.norm(dim=1) <= 3e-3 * answer.norm(dim=1)).all()
