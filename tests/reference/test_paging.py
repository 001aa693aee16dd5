"""Rows in and out of a paged cache."""

from __future__ import annotations

import pytest
import torch

from reference.paging import gather, mark, scatter


@pytest.mark.parametrize("rows", [0, 4, 64])
def test_rows_come_back_and_nothing_else_changes(rows: int) -> None:
    shape = (9, 2, rows, 8) if rows else (9, 2, 8)
    cache = torch.full(shape, torch.nan)
    table = torch.tensor([7, 0, 3, 5, -1], dtype=torch.int32)
    per_page = max(rows, 1)
    first, count = per_page + per_page // 2, 2 * per_page
    data = torch.randn(count, 2, 8)
    scatter(cache, table, first, data)
    assert torch.equal(gather(cache, table, count, first), data)
    touched = torch.zeros(shape[:-1], dtype=torch.bool)
    mark(touched, table, first, count)
    assert torch.equal(touched, ~cache[..., 0].isnan())
    assert int(touched.sum()) == 2 * count


def test_a_row_lies_where_its_page_says() -> None:
    cache = torch.arange(3 * 1 * 4).reshape(3, 1, 4, 1)
    table = torch.tensor([2, 0, 1], dtype=torch.int32)
    assert gather(cache, table, 6).flatten().tolist() == [8, 9, 10, 11, 0, 1]
