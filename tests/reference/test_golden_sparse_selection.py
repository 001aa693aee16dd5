"""The selection of the sparse layers against what the model authors' kernels answered (tests/golden/sparse_*)."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from reference import compression, selection
from reference.numerics import MODEL

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = (
    "sparse_prefill_small",
    "sparse_prefill_9001",
    "sparse_varlen",
    "sparse_decode",
    "sparse_smooth",
    "sparse_edge_1535",
    "sparse_edge_1503_batch",
)
EDGES = ("sparse_edge_1535", "sparse_edge_1503_batch")


def made(seed: int, shape: tuple[int, ...], scale: float, structure: str) -> Tensor:
    """One input of a golden file, by its recipe."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * scale
    if structure == "repeat256":
        x = x[:256].repeat(-(-shape[0] // 256), *(1 for _ in shape[1:]))[: shape[0]]
    elif structure == "smooth":
        c = torch.randn((shape[0] // 97 + 1, *shape[1:]), generator=generator) * scale * 1.5
        x = 0.3 * x + c.repeat_interleave(97, 0)[: shape[0]]
    return x.to(torch.bfloat16)


@functools.lru_cache(maxsize=1)
def load(name: str) -> tuple[dict[str, Any], dict[str, Tensor], Tensor, Tensor]:
    """Recipe, stored tensors, q and k of a golden file."""
    with safe_open(str(GOLDEN / f"{name}.safetensors"), "pt") as file:
        recipe = json.loads(file.metadata()["recipe"])
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    tokens, queries = sum(recipe["lens"]), len(recipe["lens"]) if recipe["decode"] else sum(recipe["lens"])
    scale, structure = recipe["scale"], recipe["structure"]
    q = made(recipe["seed"], (queries, 32, 128), scale, "iid" if structure == "repeat256" else structure)
    k = made(recipe["seed"] + 1, (tokens, 2, 128), scale, structure)
    return recipe, stored, q, k


def queries(name: str, end_effect: bool):  # noqa: ANN201 - a generator of per-sequence facts
    """For every sequence: stored row numbers, q, k1, k2, positions, keys and the end effect's argument."""
    recipe, stored, q, k = load(name)
    rows, first = stored["rows"], 0
    for index, length in enumerate(recipe["lens"]):
        keys = k[first : first + length]
        k1 = compression.compress(keys, 32, 16, MODEL)
        k2 = compression.compress(keys, 128, 64, MODEL)
        if recipe["decode"]:
            where = torch.tensor([index])
            wanted, positions = where, torch.tensor([length - 1])
        else:
            where = torch.nonzero((rows >= first) & (rows < first + length))[:, 0]
            wanted, positions = rows[where], rows[where] - first
        yield where, q[wanted], k1, k2, positions, length, length if end_effect else None
        first += length


def ordinal(x: Tensor) -> Tensor:
    """Position of bfloat16 numbers ≥ 0 on the line of all bfloat16 numbers."""
    return x.contiguous().view(torch.int16).int()


@pytest.mark.parametrize("name", FILES)
def test_inputs_are_those_of_the_recipe(name: str) -> None:
    recipe, _, q, k = load(name)
    for key, tensor in (("q", q), ("k", k)):
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        assert hashlib.sha256(data).hexdigest() == recipe["sha256"][key]


@pytest.mark.parametrize("name", FILES)
def test_compressed_keys(name: str) -> None:
    recipe, stored, _, k = load(name)
    keys = k[: recipe["lens"][0]]
    k1, k2 = compression.compress(keys, 32, 16, MODEL), compression.compress(keys, 128, 64, MODEL)
    assert k1.shape[0] == recipe["n1"][0] and k2.shape[0] == recipe["n2"][0]
    assert torch.equal(k1[: len(stored["k1_head"])], stored["k1_head"])
    assert torch.equal(k2[: len(stored["k2_head"])], stored["k2_head"])


@pytest.mark.parametrize("name", FILES)
def test_scores_within_one_step(name: str) -> None:
    _, stored, _, _ = load(name)
    same = total = 0
    for where, q, k1, k2, positions, _, end in queries(name, name in EDGES):
        found = selection.scores(q, k1, k2, positions, MODEL, end)
        wanted = stored["score"][:, where, : found.shape[-1]]
        steps = (ordinal(found) - ordinal(wanted)).abs()
        assert int(steps.max()) <= 1
        assert torch.equal(found == 0, wanted == 0)
        same, total = same + int((steps == 0).sum()), total + steps.numel()
    assert same / total > 0.999


@pytest.mark.parametrize("name", FILES)
def test_pooled_and_chosen_given_the_scores(name: str) -> None:
    recipe, stored, _, _ = load(name)
    blocks = stored["pooled"].shape[-1]
    for where, _, k1, _, positions, _, _ in queries(name, False):
        scores = stored["score"][:, where, : k1.shape[0]]
        pooled = selection.pool(scores, positions, blocks, recipe["init_blocks"], recipe["local_blocks"])
        assert torch.equal(pooled, stored["pooled"][:, where])
        chosen = selection.choose(pooled, positions, recipe["topk"])
        wanted = stored["topk_idx"][:, where]
        assert torch.equal(chosen, wanted)


@pytest.mark.parametrize("name", FILES)
def test_blocks_from_the_inputs(name: str) -> None:
    recipe, stored, _, _ = load(name)
    differing = total = 0
    for where, q, k1, k2, positions, length, end in queries(name, name in EDGES):
        chosen = selection.select_blocks(
            q,
            k1,
            k2,
            positions,
            length,
            topk_total=recipe["topk"],
            local_blocks=recipe["local_blocks"],
            init_blocks=recipe["init_blocks"],
            precision=MODEL,
            end_effect=end,
        )
        wanted = stored["topk_idx"][:, where].transpose(0, 1)
        differing += int((chosen != wanted).any(-1).sum())
        total += chosen.shape[0] * chosen.shape[1]
    assert total and differing == 0


@pytest.mark.parametrize("name", EDGES)
def test_the_end_effect_shows(name: str) -> None:
    _, stored, _, _ = load(name)
    differing = 0
    for where, q, k1, k2, positions, length, _ in queries(name, False):
        found = selection.scores(q, k1, k2, positions, MODEL)
        differs = not torch.equal(found == 0, stored["score"][:, where, : k1.shape[0]] == 0)
        assert differs == (length % 16 == 15)
        differing += differs
    assert differing
