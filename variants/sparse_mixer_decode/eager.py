"""The three eager parts in a row."""

from __future__ import annotations

import torch
from torch import Tensor

from variants.key_compression.eager import eager as append
from variants.sparse_attention_decode.eager import eager as attend
from variants.sparse_select_decode.eager import eager as select
from workbench.variant import variant


@variant()
def eager(
    qkvg: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k1_cache: Tensor,
    k2_cache: Tensor,
    out: Tensor,
    topk_blocks: int,
    init_blocks: int,
    local_blocks: int,
) -> None:
    """Append and compress, choose, attend and gate; the queries, keys, values and gates are views of `qkvg`."""
    batch, groups, dim = qkvg.shape[0], k_cache.shape[1], k_cache.shape[-1]
    q, k, v, gate = qkvg.split((out.shape[1], groups * dim, groups * dim, out.shape[1]), -1)
    q, k, v = q.unflatten(-1, (-1, dim)), k.unflatten(-1, (groups, dim)), v.unflatten(-1, (groups, dim))
    bounds = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    start = torch.where(lengths < 0, -1, lengths - 1)
    append(k, v, bounds, start, block_table, k_cache, v_cache, k1_cache, k2_cache)
    blocks = torch.full((batch, groups, topk_blocks), -1, dtype=torch.int32, device=q.device)
    select(q, lengths, block_table, k1_cache, k2_cache, blocks, init_blocks, local_blocks)
    attend(q, gate, lengths, block_table, blocks, k_cache, v_cache, out)
