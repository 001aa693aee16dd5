"""Plain torch: a sequence's keys gathered once, its queries some hundred at a time; lengths are read on the host."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workbench.variant import variant

SCORES = 1 << 27
"""Float32 scores held at once."""


def product(a: Tensor, b: Tensor) -> Tensor:
    """Batched a·b of bfloat16 matrices [n, m, k] and [n, k, l], accumulated and returned in float32."""
    return torch.bmm(a, b, out_dtype=torch.float32) if a.device.type == "cuda" else a.float() @ b.float()


@variant()
def eager(
    q: Tensor,
    gate: Tensor,
    cu_seqlens: Tensor,
    start: Tensor,
    block_table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
) -> None:
    """For some queries of a sequence: products with the keys up to the last of them, masked, softmax, gate."""
    _, heads, dim = q.shape
    _, kv_heads, page_size, _ = k_cache.shape
    cuts, starts = cu_seqlens.tolist(), start.tolist()
    for b, begun in enumerate(starts):
        length = cuts[b + 1] - cuts[b]
        if begun < 0 or length == 0:
            continue
        pages = block_table[b, : -(-(begun + length) // page_size)].long()
        keys = k_cache[pages].transpose(0, 1).flatten(1, 2)[:, : begun + length]
        values = v_cache[pages].transpose(0, 1).flatten(1, 2)[:, : begun + length]
        step = max(1, SCORES // (heads * (begun + length)))
        for first in range(0, length, step):
            count = min(step, length - first)
            rows = slice(cuts[b] + first, cuts[b] + first + count)
            end = begun + first + count
            query = q[rows].unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)
            logits = (product(query, keys[:, :end].mT) * dim**-0.5).unflatten(1, (count, -1))
            unseen = torch.arange(end, device=q.device) > torch.arange(end - count, end, device=q.device)[:, None]
            weights = torch.softmax(logits.masked_fill_(unseen[:, None], -math.inf), -1).to(q.dtype)
            attended = product(weights.flatten(1, 2), values[:, :end]).to(q.dtype)
            attended = attended.unflatten(1, (count, -1)).transpose(0, 1).flatten(1)
            out[rows] = attended * torch.sigmoid(gate[rows])
