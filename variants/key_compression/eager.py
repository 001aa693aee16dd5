"""Batched torch: tokens and windows of all sequences together, without asking the device anything.

Shapes never depend on the data: as many windows are computed as a piece of this size could complete, and the
surplus repeats what the first real one writes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.variant import variant


def _targets(live: Tensor) -> tuple[Tensor, Tensor]:
    """For each row itself if live, else the first live row; and whether there is any."""
    index = torch.arange(live.numel(), device=live.device)
    first = live.to(torch.uint8).argmax()
    return torch.where(live, index, first), live.any()


def _put(cache: Tensor, pages: Tensor, places: Tensor, rows: Tensor, live: Tensor) -> None:
    """cache[pages, :, places] = rows where live; rows that are not live repeat the first that is, or change nothing."""
    source, some = _targets(live)
    pages, places = torch.where(some, pages[source], 0), torch.where(some, places[source], 0)
    cache[pages, :, places] = torch.where(some, rows[source], cache[pages, :, places])


def _complete(
    compressed: Tensor,
    keys: Tensor,
    table: Tensor,
    start: Tensor,
    end: Tensor,
    limit: int,
    size: int,
    stride: int,
) -> None:
    """Write the windows that end within start … end−1 of each sequence, at most `limit` of them in all."""
    before, after = (((n - size) // stride + 1).clamp_min(0) for n in (start, end))
    upto = (after - before).cumsum(0)
    number = torch.arange(limit, device=table.device)
    owner = torch.searchsorted(upto, number, right=True).clamp_max(len(start) - 1)
    window = after[owner] - upto[owner] + number
    live = number < upto[-1]
    window = window.clamp(torch.zeros_like(window), (end[owner] - size).clamp_min(0) // stride)
    positions = window[:, None] * stride + torch.arange(size, device=table.device)
    pages = table[owner[:, None], positions // 64].clamp_min(0)
    means = keys[pages, :, positions % 64].float().mean(1).to(torch.bfloat16)
    places = compressed.shape[2]
    _put(compressed, table[owner, window // places].clamp_min(0), window % places, means, live)


@variant()
def eager(
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    start: Tensor,
    block_table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k1_cache: Tensor,
    k2_cache: Tensor,
) -> None:
    """Scatter all tokens, then gather and average all windows of either kind."""
    tokens, batch = k.shape[0], start.shape[0]
    table, bounds, begin = block_table.long(), cu_seqlens.long(), start.long()
    number = torch.arange(tokens, device=k.device)
    owner = torch.searchsorted(bounds[1:].contiguous(), number, right=True).clamp_max(batch - 1)
    positions = (begin[owner] + number - bounds[owner]).clamp_min(0)
    live = (begin[owner] >= 0) & (number < bounds[-1])
    pages = table[owner, positions.clamp_max(table.shape[1] * 64 - 1) // 64].clamp_min(0)
    _put(k_cache, pages, positions % 64, k, live)
    _put(v_cache, pages, positions % 64, v, live)
    padding = begin < 0
    begin = begin.masked_fill(padding, 0)
    end = torch.where(padding, 0, begin + bounds[1:] - bounds[:-1])
    _complete(k1_cache, k_cache, table, begin, end, tokens // 16 + batch, 32, 16)
    _complete(k2_cache.unsqueeze(2), k_cache, table, begin, end, tokens // 64 + batch, 128, 64)
