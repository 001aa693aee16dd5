"""Compressed keys: which exist, what they are, and the same bits in one piece, in pieces and token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from reference import compression
from reference.numerics import MODEL, ORACLE
from reference.random import normal

LEVELS = [(32, 16), (128, 64)]


def history(n: int, seed: int = 0) -> Tensor:
    """Keys bfloat16 [n, 2, 8]."""
    return normal(seed, (n, 2, 8))


@pytest.mark.parametrize(("size", "stride"), LEVELS)
def test_a_window_exists_once_its_last_key_does(size: int, stride: int) -> None:
    for n in range(700):
        full = sum(1 for j in range(n) if stride * j + size <= n)
        assert compression.window_count(n, size, stride) == full == max(0, n // stride - 1)


@pytest.mark.parametrize(("size", "stride"), LEVELS)
@pytest.mark.parametrize("n", [0, 31, 32, 127, 128, 129, 333])
def test_a_row_is_the_mean_of_its_window(size: int, stride: int, n: int) -> None:
    keys = history(n)
    for precision in (MODEL, ORACLE):
        found = compression.compress(keys, size, stride, precision)
        assert found.shape == (compression.window_count(n, size, stride), 2, 8)
        for j, row in enumerate(found):
            mean = keys[stride * j : stride * j + size].double().mean(0)
            wanted = mean.float().to(torch.bfloat16) if precision is MODEL else mean
            assert torch.equal(row, wanted)


def test_how_many_windows_are_averaged_together_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = history(2000)
    whole = compression.compress(keys, 32, 16, MODEL)
    monkeypatch.setattr(compression, "_CHUNK", 7)
    assert torch.equal(compression.compress(keys, 32, 16, MODEL), whole)


def empty_caches(pages: int) -> dict[str, Tensor]:
    """Four caches full of NaN."""
    shapes = {"k_cache": (pages, 2, 64, 8), "v_cache": (pages, 2, 64, 8), "k1_cache": (pages, 2, 4, 8)}
    return {name: torch.full(shape, torch.nan, dtype=torch.bfloat16) for name, shape in shapes.items()} | {
        "k2_cache": torch.full((pages, 2, 8), torch.nan, dtype=torch.bfloat16)
    }


@pytest.mark.parametrize("pieces", [[333], [100, 233], [64, 64, 205], [17] * 19 + [10], [1] * 333])
def test_any_pieces_leave_the_same_bits(pieces: list[int]) -> None:
    keys, values, table = history(333), history(333, 1), torch.tensor([4, 2, 6, 0, 3, 5, -1], dtype=torch.int32)
    whole, parts = empty_caches(8), empty_caches(8)
    compression.append(keys, values, 0, table, **whole, precision=MODEL)
    start = 0
    for size in pieces:
        rows = slice(start, start + size)
        compression.append(keys[rows], values[rows], start, table, **parts, precision=MODEL)
        start += size
    for name, cache in whole.items():
        assert torch.equal(cache.view(torch.int16), parts[name].view(torch.int16)), name
    assert int((~whole["k1_cache"].isnan()).sum()) == 19 * 2 * 8
    assert int((~whole["k2_cache"].isnan()).sum()) == 4 * 2 * 8
