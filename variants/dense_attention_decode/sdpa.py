"""torch's scaled_dot_product_attention: the 16 query heads of a key-value head pose as 16 queries of one head."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from workbench.variant import variant


@variant()
def sdpa(
    q: Tensor,
    gate: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
) -> None:
    """Gather the pages of a sequence, mask what lies past its length; a padded row is written back as it was."""
    batch, heads, _ = q.shape
    _, kv_heads, page_size, _ = k_cache.shape
    index = torch.arange(block_table.shape[1] * page_size, device=q.device)
    # A padded row looks at key 0: a row that sees nothing would make torch divide by zero.
    seen = index < lengths.clamp(min=1)[:, None]
    pages = block_table.clamp(min=0).long()
    for b in range(batch):
        unseen = ~seen[b, :, None]
        keys = k_cache[pages[b]].transpose(0, 1).flatten(1, 2).masked_fill(unseen, 0.0)
        values = v_cache[pages[b]].transpose(0, 1).flatten(1, 2).masked_fill(unseen, 0.0)
        queries = q[b].unflatten(0, (kv_heads, heads // kv_heads))
        mask = seen[b].expand(1, 1, queries.shape[1], -1)
        attended = scaled_dot_product_attention(queries[None], keys[None], values[None], attn_mask=mask)
        gated = attended.flatten() * torch.sigmoid(gate[b])
        out[b] = torch.where(lengths[b] >= 0, gated, out[b])
