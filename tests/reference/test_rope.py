"""Rotary embedding: the release's table, pairs and roundings."""

from __future__ import annotations

import math

import pytest
import torch

from reference.numerics import MODEL, ORACLE
from reference.rope import angles, apply_rope, frequencies

THETA = 10000.0


def test_frequencies_are_the_release_formula_bit_for_bit() -> None:
    release = 1.0 / (THETA ** (torch.arange(0, 128, 2, dtype=torch.float32) / 128))
    assert torch.equal(frequencies(128, THETA), release)


def test_angles_round_the_product_to_float32() -> None:
    positions = torch.tensor([0, 1, 524287, 1048575, 2097151])
    expected = positions.float()[:, None] * frequencies(128, THETA)
    assert torch.equal(angles(positions, 128, THETA), expected)
    exact = positions.double()[:, None] * THETA ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    assert (angles(positions, 128, THETA).double() - exact).abs().max() > 0.01  # why the rounding is part of the model


def test_position_zero_changes_nothing() -> None:
    x = torch.randn(1, 3, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(apply_rope(x, torch.zeros(1, dtype=torch.int32), THETA, MODEL), x)


def test_pairs_are_half_a_head_apart() -> None:
    x = torch.zeros(1, 1, 128, dtype=torch.bfloat16)
    x[..., 0] = 1
    out = apply_rope(x, torch.tensor([1]), THETA, ORACLE)[0, 0]
    assert out[0].item() == pytest.approx(math.cos(1.0), abs=1e-12)
    assert out[64].item() == pytest.approx(math.sin(1.0), abs=1e-12)
    assert out.count_nonzero() == 2


def test_rounds_as_the_release_does_in_float32() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(64, 2, 128, generator=generator).bfloat16()
    positions = torch.randint(0, 1 << 20, (64,), generator=generator)
    angle = angles(positions, 128, THETA)[:, None].repeat(1, 1, 2).double()
    cos, sin = angle.cos().float(), angle.sin().float()
    wide = x.float()
    turned = torch.cat((-wide[..., 64:], wide[..., :64]), -1)
    assert torch.equal(apply_rope(x, positions, THETA, MODEL), (wide * cos + turned * sin).bfloat16())


def test_keeps_lengths() -> None:
    x = torch.randn(5, 2, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    out = apply_rope(x, torch.arange(5) + 100000, THETA, ORACLE)
    torch.testing.assert_close(out.norm(dim=-1), x.double().norm(dim=-1), rtol=1e-12, atol=0)


def test_leading_dimensions_are_independent() -> None:
    x = torch.randn(3, 5, 2, 128, generator=torch.Generator().manual_seed(4)).bfloat16()
    positions = torch.tensor([[0], [777], [90000]]) + torch.arange(5)
    together = apply_rope(x, positions, THETA, MODEL)
    for b in range(3):
        assert torch.equal(together[b], apply_rope(x[b], positions[b], THETA, MODEL))
