"""Batched torch: the compressed keys of all sequences are gathered by page, scored, pooled and cut to the best."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.variant import variant

BLOCK = 64


def _logits(q: Tensor, keys: Tensor) -> Tensor:
    """q·k/√128 in float32, [B·KV, 16, rows], of `q` [B·KV, 16, 128] and `keys` [B·KV, rows, 128]."""
    if q.is_cuda:
        return torch.bmm(q, keys.mT, out_dtype=torch.float32) * q.shape[-1] ** -0.5
    return torch.bmm(q.float(), keys.float().mT) * q.shape[-1] ** -0.5


@variant()
def eager(
    q: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    k1_cache: Tensor,
    k2_cache: Tensor,
    blocks: Tensor,
    init_blocks: int,
    local_blocks: int,
) -> None:
    """Score every page of the block table, so that no shape depends on the lengths."""
    batch, heads, width = q.shape
    groups, pages = k2_cache.shape[1], block_table.shape[1]
    table = block_table.clamp_min(0).long()
    n = lengths.long()[:, None, None]
    queries = q.reshape(batch * groups, heads // groups, width)

    coarse = k2_cache[table].transpose(1, 2).reshape(batch * groups, pages, width)
    column = torch.arange(pages, device=q.device)
    seen = column < n // 64 - 1
    b = _logits(queries, coarse).reshape(batch, heads, pages).masked_fill(~seen, -torch.inf)
    normaliser = torch.logsumexp(b, -1, keepdim=True).reshape(batch * groups, -1, 1)

    fine = k1_cache[table].transpose(1, 2).reshape(batch * groups, pages * 4, width)
    weights = (_logits(queries, fine) - normaliser).exp().sum(1).reshape(batch, groups, pages * 4)
    hidden = (torch.arange(pages * 4, device=q.device) >= n // 16 - 1) | (n < 128)
    scores = weights.masked_fill(hidden, 0.0).to(torch.bfloat16)

    own = (n - 1) // BLOCK
    highest = torch.finfo(torch.bfloat16).max
    pooled = scores.unflatten(-1, (pages, 4)).amax(-1)
    pooled[..., 1:] = torch.maximum(pooled[..., 1:], scores[..., 3:-1:4])
    pooled = pooled.clamp_max(highest)
    forced = (column < init_blocks) | (column >= own - local_blocks)
    pooled = pooled.masked_fill(forced, torch.inf).masked_fill(column > own, -torch.inf)

    count = blocks.shape[-1]
    chosen = pooled.float().topk(min(count, pages), sorted=False).indices
    chosen = chosen.masked_fill(chosen > own, pages).sort(-1).values
    chosen = torch.nn.functional.pad(chosen, (0, count - chosen.shape[-1]), value=pages)
    chosen = chosen.masked_fill(chosen == pages, -1).to(torch.int32)
    blocks.copy_(torch.where(lengths[:, None, None] < 0, blocks, chosen))
