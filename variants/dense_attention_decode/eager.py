"""Plain torch: gathers all pages of a sequence, two batched products, a sequence at a time, no host involved."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workbench.variant import variant


def product(a: Tensor, b: Tensor) -> Tensor:
    """Batched a·b of bfloat16 matrices [n, m, k] and [n, k, l], accumulated and returned in float32."""
    return torch.bmm(a, b, out_dtype=torch.float32) if a.device.type == "cuda" else a.float() @ b.float()


@variant()
def eager(
    q: Tensor,
    gate: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
) -> None:
    """Gather, mask, softmax, gate; a padded row is written back as it was."""
    batch, heads, dim = q.shape
    _, kv_heads, page_size, _ = k_cache.shape
    index = torch.arange(block_table.shape[1] * page_size, device=q.device)
    seen = index < lengths[:, None]
    pages = block_table.clamp(min=0).long()
    for b in range(batch):
        keys = k_cache[pages[b]].transpose(0, 1).flatten(1, 2)
        values = v_cache[pages[b]].transpose(0, 1).flatten(1, 2).masked_fill(~seen[b, :, None], 0.0)
        logits = product(q[b].unflatten(0, (kv_heads, heads // kv_heads)), keys.mT) * dim**-0.5
        weights = torch.softmax(logits.masked_fill_(~seen[b], -math.inf), -1).to(q.dtype)
        attended = product(weights, values).to(q.dtype).flatten()
        out[b] = torch.where(lengths[b] >= 0, attended * torch.sigmoid(gate[b]), out[b])
