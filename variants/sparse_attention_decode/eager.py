"""Plain torch: gathers the chosen pages of a few sequences at a time, two batched products, no host involved."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workbench.variant import variant

PAGE = 64
SEQUENCES = 16
"""Sequences gathered together: at 96 blocks 100 MB of keys and values."""


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
    lengths: Tensor,
    block_table: Tensor,
    blocks: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
) -> None:
    """Gather, mask, softmax, gate; a padded row is written back as it was."""
    batch, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    head = torch.arange(kv_heads, device=q.device)[None, :, None]
    within = torch.arange(PAGE, device=q.device)
    for first in range(0, batch, SEQUENCES):
        rows = slice(first, first + SEQUENCES)
        chosen, length = blocks[rows], lengths[rows]
        seen = (chosen >= 0)[..., None] & ((chosen * PAGE)[..., None] + within < length[:, None, None, None])
        table = block_table[rows][:, None].expand(-1, kv_heads, -1)
        page = table.gather(2, chosen.clamp(0, table.shape[-1] - 1).long()).clamp(min=0).long()
        unseen = ~seen[..., None]
        keys = k_cache[page, head].masked_fill_(unseen, 0.0).flatten(2, 3)
        values = v_cache[page, head].masked_fill_(unseen, 0.0).flatten(2, 3)
        query = q[rows].unflatten(1, (kv_heads, heads // kv_heads))
        logits = product(query, keys.mT) * dim**-0.5
        weights = torch.softmax(logits.masked_fill_(~seen.flatten(2)[:, :, None], -math.inf), -1)
        attended = product(weights.to(q.dtype), values).to(q.dtype).reshape(-1, heads * dim)
        gated = attended * torch.sigmoid(gate[rows])
        out[rows] = torch.where((length >= 0)[:, None], gated, out[rows])
