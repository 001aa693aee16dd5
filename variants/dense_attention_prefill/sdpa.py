"""torch's scaled_dot_product_attention, a sequence at a time; lengths are read on the host.

A piece that is a whole prompt is plainly causal, which has torch's fastest kernels; one with a prefix needs a mask,
and then goes some queries at a time, whose 16 heads a key-value head pose as further queries.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from workbench.variant import variant

MASK = 1 << 28
"""Elements of a mask held at once."""


@variant()
def sdpa(
    q: Tensor,
    gate: Tensor,
    cu_seqlens: Tensor,
    start: Tensor,
    block_table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
) -> None:
    """Gather a sequence's keys, attend, gate."""
    _, heads, _ = q.shape
    _, kv_heads, page_size, _ = k_cache.shape
    group = heads // kv_heads
    cuts, starts = cu_seqlens.tolist(), start.tolist()
    for b, begun in enumerate(starts):
        length = cuts[b + 1] - cuts[b]
        if begun < 0 or length == 0:
            continue
        pages = block_table[b, : -(-(begun + length) // page_size)].long()
        keys = k_cache[pages].transpose(0, 1).flatten(1, 2)[None, :, : begun + length]
        values = v_cache[pages].transpose(0, 1).flatten(1, 2)[None, :, : begun + length]
        if begun == 0:
            rows = slice(cuts[b], cuts[b + 1])
            query = q[rows].transpose(0, 1)[None]
            attended = scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
            out[rows] = attended[0].transpose(0, 1).flatten(1) * torch.sigmoid(gate[rows])
            continue
        step = max(1, MASK // (group * (begun + length)))
        for first in range(0, length, step):
            count = min(step, length - first)
            rows = slice(cuts[b] + first, cuts[b] + first + count)
            end = begun + first + count
            query = q[rows].unflatten(1, (kv_heads, group)).transpose(0, 1).flatten(1, 2)[None]
            seen = torch.arange(end, device=q.device) <= torch.arange(end - count, end, device=q.device)[:, None]
            mask = seen.repeat_interleave(group, 0)
            attended = scaled_dot_product_attention(query, keys[:, :, :end], values[:, :, :end], attn_mask=mask)
            attended = attended[0].unflatten(1, (count, group)).transpose(0, 1).flatten(1)
            out[rows] = attended * torch.sigmoid(gate[rows])
