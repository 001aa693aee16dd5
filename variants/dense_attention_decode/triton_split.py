"""Two Triton kernels: a sequence's pages split over programs, then the parts merged by their log-sum-exp and gated.

A program takes a run of the pages of one sequence and key-value head, with its 16 query heads as the rows
of a tile, and leaves maximum, sum and unnormalised output in float32. The second kernel takes a query head of a
sequence, merges its parts in a fixed order and applies the gate.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from variants._splits import merge_kernel
from workbench.contract import Workload
from workbench.variant import variant

PAGE, GROUP, DIM = 64, 16, 128
PROGRAMS = 264
"""Programs that fill a GPU of 132 multiprocessors twice."""
SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)
INTERPRETED_SPLITS, INTERPRETED_STEP = 2, 16
"""Splits, and blocks taken at once, under Triton's interpreter, which pays by the operation and not by the element."""


@triton.jit
def _split_kernel(
    q,
    lengths,
    block_table,
    k_cache,
    v_cache,
    parts,
    sums,
    q_row,
    q_head,
    table_row,
    k_page,
    k_head,
    k_key,
    v_page,
    v_head,
    v_key,
    scale,
    SPLITS: tl.constexpr,
    STEP: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    split, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + sequence)
    if length < 0:
        return
    row, key, dim = tl.arange(0, GROUP), tl.arange(0, STEP * PAGE), tl.arange(0, DIM)
    within = key % PAGE
    head = kv_head * GROUP + row
    query = tl.load(q + sequence * q_row + head[:, None] * q_head + dim[None, :])
    table = block_table + sequence * table_row
    k_base = k_cache + kv_head * k_head + dim[None, :]
    v_base = v_cache + kv_head * v_head + dim[None, :]

    top = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    mean = tl.zeros((GROUP, DIM), tl.float32)
    used = tl.cdiv(length, PAGE)
    share = tl.cdiv(used, SPLITS)
    last = tl.minimum(used, (split + 1) * share)
    # The pages of the next step are looked up one step ahead: addresses that wait for nothing can be pipelined.
    block = split * share + key // PAGE
    page = tl.load(table + block, mask=block < last, other=0).to(tl.int64)
    for first in range(split * share, last, STEP):
        seen = tl.where(block < last, block * PAGE + within, length) < length
        keys = tl.load(k_base + (page * k_page + within * k_key)[:, None], mask=seen[:, None], other=0.0)
        values = tl.load(v_base + (page * v_page + within * v_key)[:, None], mask=seen[:, None], other=0.0)
        block = first + STEP + key // PAGE
        page = tl.load(table + block, mask=block < last, other=0).to(tl.int64)
        if INTERPRETED:
            logits = tl.dot(query.to(tl.float32), tl.trans(keys.to(tl.float32))) * scale
        else:
            logits = tl.dot(query, tl.trans(keys)) * scale
        logits = tl.where(seen[None, :], logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(logits - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(weights, 1)
        if INTERPRETED:
            bits = weights.to(tl.int32, bitcast=True)  # as in rounded(); a call costs the interpreter milliseconds
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
            rounded = bits.to(tl.float32, bitcast=True)
            mean = mean * fade[:, None] + tl.dot(rounded, values.to(tl.float32))
        else:
            mean = tl.dot(weights.to(tl.bfloat16), values, mean * fade[:, None])
        top = higher

    heads = tl.num_programs(1) * GROUP
    place = (sequence * heads + head) * SPLITS + split
    tl.store(parts + place[:, None] * DIM + dim[None, :], mean)
    tl.store(sums + place * 2, top)
    tl.store(sums + place * 2 + 1, total)


def choose(workload: Workload) -> dict[str, Any]:
    """As many splits as fill the GPU twice, no more than there are fours of pages."""
    fours = -(-workload["context"] // PAGE) // 4
    wanted = min(max(1, fours), max(1, PROGRAMS // (2 * workload["batch"])))
    return {"splits": max(s for s in SPLITS if s <= wanted)}


@variant(
    requires=("triton",),
    arch=">=sm_80",
    runs_on=("cuda", "interpreter"),
    tunables={"splits": SPLITS, "step": (1, 2), "num_warps": (2, 4, 8), "num_stages": (1, 2, 3, 4)},
    heuristic=choose,
)
def triton_split(
    q: Tensor,
    gate: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    *,
    splits: int = 8,
    step: int = 1,
    num_warps: int = 4,
    num_stages: int = 3,
) -> None:
    """Split, merge, gate. `step`: pages taken at once."""
    batch, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    interpreted = q.device.type != "cuda"
    if interpreted:
        splits, step = min(splits, INTERPRETED_SPLITS), INTERPRETED_STEP
    parts = torch.empty(batch, heads, splits, dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(batch, heads, splits, 2, dtype=torch.float32, device=q.device)
    _split_kernel[(splits, kv_heads, batch)](
        q,
        lengths,
        block_table,
        k_cache,
        v_cache,
        parts,
        sums,
        *q.stride()[:2],
        block_table.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        dim**-0.5 * 1.4426950408889634,
        SPLITS=splits,
        STEP=step,
        PAGE=PAGE,
        GROUP=GROUP,
        DIM=DIM,
        INTERPRETED=interpreted,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    merged = heads if interpreted else 1
    merge_kernel[(heads // merged, batch)](
        parts,
        sums,
        gate,
        lengths,
        out,
        gate.stride(0),
        out.stride(0),
        heads,
        SPLITS=splits,
        WIDTH=triton.next_power_of_2(splits),
        HEADS=merged,
        DIM=DIM,
        INTERPRETED=interpreted,
        num_warps=4,
    )
