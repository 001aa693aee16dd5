"""Compressed keys: means over overlapping windows, by which the sparse layers choose their blocks.

Two levels (InfLLM-V2): k1 with windows of 32 keys every 16, k2 with windows of 128 every 64, both from the
keys themselves. Only full windows exist, so that n keys have ⌊n/16⌋−1 and ⌊n/64⌋−1 of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import K1_SIZE, K1_STRIDE, K2_SIZE, K2_STRIDE
from .numerics import Precision, bf16, f32
from .paging import gather, scatter

_CHUNK = 4096
"""Windows averaged at a time: bounds the float64 copy of the keys, never changes a bit."""


def window_count(keys: int, size: int, stride: int) -> int:
    """Number of full windows over `keys` keys."""
    return max(0, (keys - size) // stride + 1)


def compress(keys: Tensor, size: int, stride: int, precision: Precision) -> Tensor:
    """Mean of each full window over `keys` [n, KV, D], rounded to float32 and then bfloat16.

    Row j is the mean of keys stride·j … stride·j+size−1; the result is [windows, KV, D].
    """
    count = window_count(keys.shape[0], size, stride)
    out = torch.empty((count, *keys.shape[1:]), dtype=bf16(keys[:0], precision).dtype, device=keys.device)
    for first in range(0, count, _CHUNK):
        last = min(first + _CHUNK, count)
        part = keys[first * stride : (last - 1) * stride + size].double()
        means = part.unfold(0, size, stride).mean(-1)
        out[first:last] = bf16(f32(means, precision), precision)
    return out


def append(
    keys: Tensor,
    values: Tensor,
    start: int,
    table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k1_cache: Tensor,
    k2_cache: Tensor,
    precision: Precision,
) -> None:
    """Append a piece of one sequence to its paged caches, and complete the windows that end within it.

    `keys` and `values` [t, KV, D] are tokens start … start+t−1; `table` is the sequence's row of the block table.
    Written in place: those rows of `k_cache` and `v_cache` [pages, KV, 64, D], and of `k1_cache`
    [pages, KV, 4, D] and `k2_cache` [pages, KV, D] the windows that ended with none of the earlier keys.
    A window may begin before the piece: its keys are read back from the cache.
    """
    end = start + keys.shape[0]
    scatter(k_cache, table, start, keys)
    scatter(v_cache, table, start, values)
    _complete(k_cache, k1_cache, table, start, end, K1_SIZE, K1_STRIDE, precision)
    _complete(k_cache, k2_cache, table, start, end, K2_SIZE, K2_STRIDE, precision)


def _complete(
    k_cache: Tensor,
    compressed: Tensor,
    table: Tensor,
    start: int,
    end: int,
    size: int,
    stride: int,
    precision: Precision,
) -> None:
    """Write the windows that end within keys start … end−1 to `compressed`."""
    first, count = window_count(start, size, stride), window_count(end, size, stride)
    if count > first:
        history = gather(k_cache, table, end - first * stride, first * stride)
        scatter(compressed, table, first, compress(history, size, stride, precision))
