"""Plain torch: gathers the chosen pages of a few tokens at a time, two batched products, no host involved."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workbench.variant import variant

PAGE = 64
TOKENS = 64
"""Tokens gathered together: at 96 blocks 400 MB of keys and values."""


def product(a: Tensor, b: Tensor) -> Tensor:
    """Batched a·b of bfloat16 matrices [..., m, k] and [..., k, n], accumulated and returned in float32."""
    if a.device.type != "cuda":
        return a.float() @ b.float()
    shape = (*a.shape[:-1], b.shape[-1])
    return torch.bmm(a.flatten(0, -3), b.flatten(0, -3), out_dtype=torch.float32).view(shape)


@variant()
def eager(
    q: Tensor,
    gate: Tensor,
    cu_seqlens: Tensor,
    start: Tensor,
    block_table: Tensor,
    blocks: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
) -> None:
    """Find each token's sequence and position, then gather, mask, softmax, gate; padding is written back as it was."""
    tokens, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    # Used entries come first and a token of block b has no more than b + 1 of them: the rest of the list is cut off.
    width = min(blocks.shape[2], block_table.shape[1])
    index = torch.arange(tokens, dtype=cu_seqlens.dtype, device=q.device)
    sequence = torch.searchsorted(cu_seqlens, index, right=True) - 1
    live = start[sequence] >= 0
    position = start[sequence] + index - cu_seqlens[sequence]
    head = torch.arange(kv_heads, device=q.device)[None, :, None]
    within = torch.arange(PAGE, device=q.device)
    for first in range(0, tokens, TOKENS):
        rows = slice(first, first + TOKENS)
        chosen = blocks[rows, :, :width]
        seen = (chosen >= 0)[..., None] & ((chosen * PAGE)[..., None] + within <= position[rows, None, None, None])
        page = block_table[sequence[rows, None, None], chosen.clamp(0, block_table.shape[1] - 1).long()]
        page = page.clamp(min=0).long()
        unseen = ~seen[..., None]
        keys = k_cache[page, head].masked_fill_(unseen, 0.0).flatten(2, 3)
        values = v_cache[page, head].masked_fill_(unseen, 0.0).flatten(2, 3)
        query = q[rows].unflatten(1, (kv_heads, heads // kv_heads))
        logits = product(query, keys.mT) * dim**-0.5
        weights = torch.softmax(logits.masked_fill_(~seen.flatten(2)[:, :, None], -math.inf), -1)
        attended = product(weights.to(q.dtype), values).to(q.dtype).reshape(-1, heads * dim)
        gated = attended * torch.sigmoid(gate[rows])
        out[rows] = torch.where(live[rows, None], gated, out[rows])
