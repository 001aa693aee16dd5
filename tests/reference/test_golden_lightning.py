"""The lightning recurrence against what flash-linear-attention answered on an H200 (tests/golden/)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from reference.lightning import recurrence
from reference.numerics import MODEL

GOLDEN = Path(__file__).parents[1] / "golden"


def _make(seed: int, shape: tuple[int, ...], scale: float) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def _digest(x: Tensor) -> str:
    raw = x.contiguous().view(torch.int16 if x.dtype is torch.bfloat16 else torch.int32)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()


def _relative(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("name", ["lightning_long", "lightning_mixed"])
def test_recurrence_reproduces_the_golden_file(name: str) -> None:
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as stored:
        recipe = json.loads(stored.metadata()["recipe"])
        golden = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118 (not a dict)
    tokens, sequences = sum(recipe["lens"]), len(recipe["lens"])
    q, k, v = (_make(recipe["seed"] + i, (tokens, 32, 128), recipe["scale"]).bfloat16() for i in range(3))
    for made, name_ in ((q, "q"), (k, "k"), (v, "v")):
        assert _digest(made) == recipe["sha256"][name_]
    state = torch.zeros(sequences, 32, 128, 128)
    if recipe["initial_state"]:
        state = _make(recipe["seed"] + 3, (sequences, 32, 128, 128), 1.0)
        assert _digest(state) == recipe["sha256"]["state"]

    outs, states, begin = [], [], 0
    for b, length in enumerate(recipe["lens"]):
        part = slice(begin, begin + length)
        out, final = recurrence(q[part], k[part], v[part], state[b], MODEL)
        outs.append(out)
        states.append(final[::8])
        begin += length
    out, final = torch.cat(outs)[golden["rows"]], torch.stack(states)

    assert _relative(out, golden["out_recurrent"]) < 1.5e-4  # a few last-bit flips of bfloat16
    assert _relative(final, golden["state_recurrent"]) < 1e-7
    assert _relative(out, golden["out_chunk"]) < 3.2e-3  # the chunked kernel's bfloat16 operands
    assert _relative(final, golden["state_chunk"]) < 2e-3
