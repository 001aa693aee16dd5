"""Between a paged cache and contiguous rows.

A cache is [pages, KV, rows, D], or [pages, KV, D] where a page holds one row. Row i of a sequence lies in
page `table[i // rows]` at place `i % rows`; `table` is the sequence's row of the block table, its pages
scattered and in any order. A page covers 64 keys: 64 rows of keys or values, 4 of k1, 1 of k2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rows_per_page(cache: Tensor) -> int:
    """How many rows of one sequence a page of `cache` holds."""
    return 1 if cache.dim() == 3 else cache.shape[2]


def locate(table: Tensor, first: int, count: int, rows: int) -> tuple[Tensor, Tensor]:
    """Pages and places within them of rows first … first+count−1, two int64 tensors [count]."""
    index = torch.arange(first, first + count, device=table.device)
    return table[index // rows].long(), index % rows


def gather(cache: Tensor, table: Tensor, count: int, first: int = 0) -> Tensor:
    """Copy rows first … first+count−1 of a sequence out of the cache, [count, KV, D] in the cache's dtype."""
    rows = rows_per_page(cache)
    pages, places = locate(table, first, count, rows)
    return cache[pages] if cache.dim() == 3 else cache[pages, :, places]


def scatter(cache: Tensor, table: Tensor, first: int, rows: Tensor) -> None:
    """Write `rows` [count, KV, D] in place as the sequence's rows first … first+count−1."""
    pages, places = locate(table, first, rows.shape[0], rows_per_page(cache))
    if cache.dim() == 3:
        cache[pages] = rows.to(cache.dtype)
    else:
        cache[pages, :, places] = rows.to(cache.dtype)


def mark(touched: Tensor, table: Tensor, first: int, count: int) -> None:
    """Set to True, in place, where `scatter` would write; `touched` is bool of the cache's shape without D."""
    rows = 1 if touched.dim() == 2 else touched.shape[2]
    pages, places = locate(table, first, count, rows)
    if touched.dim() == 2:
        touched[pages] = True
    else:
        touched[pages, :, places] = True
