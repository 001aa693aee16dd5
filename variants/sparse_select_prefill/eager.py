"""Torch, a sequence at a time: large matrix products over as many queries as fit, then top-k.

Reads the lengths on the host, so it cannot be captured in a graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.variant import variant

BLOCK = 64
LOGITS = {"cuda": 1 << 30, "cpu": 1 << 23}
"""Logits held at a time."""


def _logits(q: Tensor, keys: Tensor) -> Tensor:
    """q·k/√128 in float32, [KV, rows of q, rows of keys], of `q` [KV, ·, 128] and `keys` [KV, ·, 128]."""
    if q.is_cuda:
        return torch.bmm(q, keys.mT, out_dtype=torch.float32).mul_(q.shape[-1] ** -0.5)
    return torch.bmm(q.float(), keys.float().mT).mul_(q.shape[-1] ** -0.5)


def _pooled(q: Tensor, k1: Tensor, k2: Tensor, positions: Tensor, blocks: int) -> Tensor:
    """Block scores [KV, t, blocks] bfloat16 of queries [t, 32, 128] against k1 [KV, n1, 128] and k2 [KV, n2, 128]."""
    tokens, heads, width = q.shape
    groups, fine, coarse = k1.shape[0], k1.shape[1], k2.shape[1]
    pooled = torch.zeros((groups, tokens, blocks), dtype=torch.bfloat16, device=q.device)
    if fine == 0 or coarse == 0:
        return pooled
    queries = q.reshape(tokens, groups, heads // groups, width).transpose(0, 1).reshape(groups, -1, width)
    shape = (groups, tokens, heads // groups, -1)
    unseen = torch.arange(coarse, device=q.device) >= ((positions + 1) // 64 - 1)[:, None]
    normaliser = _logits(queries, k2).view(shape).masked_fill_(unseen[:, None], -torch.inf).logsumexp(-1, keepdim=True)
    scores = _logits(queries, k1).view(shape).sub_(normaliser).exp_().sum(2)
    unseen = torch.arange(fine, device=q.device) >= ((positions + 1) // 16 - 1)[:, None]
    scores.masked_fill_(unseen | (positions < 127)[:, None], 0.0)
    scores = torch.nn.functional.pad(scores, (0, 4 * blocks - fine)).to(torch.bfloat16)
    torch.amax(scores.unflatten(-1, (blocks, 4)), -1, out=pooled)
    pooled[..., 1:] = torch.maximum(pooled[..., 1:], scores[..., 3:-1:4])
    return pooled


@variant()
def eager(
    q: Tensor,
    cu_seqlens: Tensor,
    start: Tensor,
    block_table: Tensor,
    k1_cache: Tensor,
    k2_cache: Tensor,
    blocks: Tensor,
    init_blocks: int,
    local_blocks: int,
) -> None:
    """Gather a sequence's compressed keys once, then take its queries in slices."""
    ends, starts = cu_seqlens.tolist(), start.tolist()
    count = blocks.shape[-1]
    for row, begin in enumerate(starts):
        size = ends[row + 1] - ends[row]
        if begin < 0 or size == 0:
            continue
        keys = begin + size
        pages = -(-keys // BLOCK)
        table = block_table[row, :pages].long()
        k1 = k1_cache[table].transpose(0, 1).flatten(1, 2)[:, : max(0, keys // 16 - 1)]
        k2 = k2_cache[table].transpose(0, 1)[:, : max(0, keys // 64 - 1)].contiguous()
        column = torch.arange(pages, device=q.device)
        step = max(1, LOGITS[q.device.type] // (q.shape[1] * pages * 4))
        for first in range(0, size, step):
            last = min(first + step, size)
            rows = slice(ends[row] + first, ends[row] + last)
            positions = torch.arange(begin + first, begin + last, device=q.device)
            pooled = _pooled(q[rows], k1, k2, positions, pages).clamp_max_(torch.finfo(torch.bfloat16).max)
            own = (positions // BLOCK)[:, None]
            pooled.masked_fill_((column < init_blocks) | (column >= own - local_blocks), torch.inf)
            pooled.masked_fill_(column > own, -torch.inf)
            chosen = pooled.float().topk(min(count, pages), sorted=False).indices
            chosen = chosen.masked_fill(chosen > own, pages).sort(-1).values
            chosen = chosen.masked_fill(chosen == pages, -1).to(torch.int32).transpose(0, 1)
            blocks[rows] = torch.nn.functional.pad(chosen, (0, count - chosen.shape[-1]), value=-1)
