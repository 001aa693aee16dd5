"""The Triton parts in a row: append, select in three launches, attend in two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from variants.key_compression.triton_append import triton_append as append
from variants.sparse_attention_decode import triton_split as attention
from variants.sparse_select_decode.triton_split import triton_split as select
from workbench.contract import Workload
from workbench.variant import variant


def _supports(workload: Workload) -> str | None:
    forced = workload["local_blocks"] + 1 + workload["init_blocks"]
    room = workload["topk_blocks"]
    return None if forced <= room else f"needs room for the {forced} forced blocks, got {room}"


def _heuristic(workload: Workload) -> dict[str, Any]:
    return {
        "choose_warps": max(1, min(16, workload["context"] // 64 // 256)),
        "splits": attention.choose(workload)["splits"],
    }


@variant(
    requires=("triton",),
    arch=">=sm_80",
    runs_on=("cuda", "interpreter"),
    tunables={
        "programs": (132, 264, 528),
        "choose_warps": (1, 2, 4, 8, 16, 32),
        "splits": (1, 2, 4, 8, 16, 32, 48, 96),
    },
    supports=_supports,
    heuristic=_heuristic,
)
def parts_triton(
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
    *,
    programs: int = 264,
    choose_warps: int = 8,
    splits: int = 8,
) -> None:
    """Append and compress, choose, attend and gate; the queries, keys, values and gates are views of `qkvg`."""
    batch, groups, dim = qkvg.shape[0], k_cache.shape[1], k_cache.shape[-1]
    q, k, v, gate = qkvg.split((out.shape[1], groups * dim, groups * dim, out.shape[1]), -1)
    q, k, v = q.unflatten(-1, (-1, dim)), k.unflatten(-1, (groups, dim)), v.unflatten(-1, (groups, dim))
    bounds = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    start = torch.where(lengths < 0, -1, lengths - 1)
    append(k, v, bounds, start, block_table, k_cache, v_cache, k1_cache, k2_cache)
    blocks = torch.empty((batch, groups, topk_blocks), dtype=torch.int32, device=q.device)
    select(
        q, lengths, block_table, k1_cache, k2_cache, blocks, init_blocks, local_blocks,
        programs=programs, choose_warps=choose_warps,
    )  # fmt: skip
    attention.triton_split(q, gate, lengths, block_table, blocks, k_cache, v_cache, out, splits=splits)
