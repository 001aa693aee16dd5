"""Tiles of 8 tokens × 16 heads: normaliser and block scores in one kernel, then the choice, a row a program.

A tile first walks the coarse keys it sees for its normalisers, then the fine keys up to its local window; heads are
summed and windows pooled on the way, so that no score of a single compressed key reaches memory. A block's five
windows straddle two blocks: two numbers are stored a block, the maximum of windows 4b … 4b+3 and window 4b+3
alone, which the choice also counts for the next block. The choice finds the last score that gets in two bits at a
time (scores are not negative, so their bits order as they do) and ranks by one prefix sum, lower blocks first.
Tiles are taken in slices that bound the scratch memory.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench.contract import Workload
from workbench.variant import variant

LOG2E = 1.4426950408889634
SCRATCH = 1 << 28
"""Block scores held at a time, counting both numbers a block."""


@triton.jit
def _dot(q, k, INTERPRETED: tl.constexpr):
    # q·kᵀ; Triton's interpreter does not know bfloat16 products.
    if INTERPRETED:
        return tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)))
    return tl.dot(q, tl.trans(k))


@triton.jit
def _locate(tile, cu_seqlens, start, batch, BATCH: tl.constexpr, TOKENS: tl.constexpr):
    # Sequence of a tile (`batch` if it has none) and the tile's number within the sequence.
    lanes = tl.arange(0, BATCH)
    begin = tl.load(start + lanes, mask=lanes < batch, other=-1)
    opens = tl.load(cu_seqlens + lanes, mask=lanes < batch, other=0)
    closes = tl.load(cu_seqlens + lanes + 1, mask=lanes < batch, other=0)
    tiles = tl.where(begin < 0, 0, (closes - opens + TOKENS - 1) // TOKENS)
    seq = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    return seq, tile - tl.sum(tl.where(lanes < seq, tiles, 0), 0)


@triton.jit
def _score_kernel(
    q, cu_seqlens, start, block_table, k1_cache, k2_cache, highest, last,
    scale, count, local_blocks, pages, batch, tile_first,
    q_token, q_head, table_row, k1_page, k1_head, k1_row, k2_page, k2_head,
    BATCH: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    UNSEEN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    # UNSEEN: without a local window a free block may have a window that is not visible yet.
    seq, within = _locate(tile_first + tl.program_id(0), cu_seqlens, start, batch, BATCH, TOKENS)
    group = tl.program_id(1)
    if seq < batch:
        opens, begin = tl.load(cu_seqlens + seq), tl.load(start + seq)
        size = tl.load(cu_seqlens + seq + 1) - opens
        first_token = within * TOKENS
        final = begin + tl.minimum(first_token + TOKENS, size) - 1  # position of the tile's last token
        own = final // 64
        if own + 1 > count:
            rows = tl.arange(0, TOKENS * GROUP)
            token = tl.minimum(first_token + rows // GROUP, size - 1)
            position = begin + token
            columns = tl.arange(0, DIM)
            place = (opens + token).to(tl.int64) * q_token + (group * GROUP + rows % GROUP) * q_head
            queries = tl.load(q + place[:, None] + columns[None, :])
            table = block_table + seq.to(tl.int64) * table_row
            lane = tl.arange(0, TILE)

            # Normalisers over the coarse keys; all rows see those of the first loop.
            seen = (position + 1) // 64 - 1
            visible = (final + 1) // 64 - 1
            common = tl.maximum((begin + first_token + 1) // 64 - 1, 0) // TILE * TILE
            top = tl.full((TOKENS * GROUP,), -float("inf"), tl.float32)
            total = tl.zeros((TOKENS * GROUP,), tl.float32)
            coarse = k2_cache + group * k2_head + columns[None, :]
            for at in range(0, common, TILE):
                page = tl.load(table + at + lane).to(tl.int64)
                logits = _dot(queries, tl.load(coarse + page[:, None] * k2_page), INTERPRETED) * scale
                higher = tl.maximum(top, tl.max(logits, 1))
                total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(logits - higher[:, None]), 1)
                top = higher
            for at in range(common, visible, TILE):
                page = tl.load(table + tl.minimum(at + lane, visible - 1)).to(tl.int64)
                logits = _dot(queries, tl.load(coarse + page[:, None] * k2_page), INTERPRETED) * scale
                logits = tl.where((at + lane)[None, :] < seen[:, None], logits, -float("inf"))
                higher = tl.maximum(top, tl.max(logits, 1))
                total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(logits - higher[:, None]), 1)
                top = higher
            normaliser = top + tl.log2(total)

            # Block scores.
            existing = (final + 1) // 16 - 1
            fine = k1_cache + group * k1_head + columns[None, :]
            target = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64) * tl.num_programs(1) + group
            for at in range(0, tl.minimum((own - local_blocks) * 4, existing), TILE):
                window = tl.minimum(at + lane, existing - 1)
                page = tl.load(table + window // 4).to(tl.int64)
                keys = tl.load(fine + (page * k1_page + (window % 4) * k1_row)[:, None])
                weights = tl.exp2(_dot(queries, keys, INTERPRETED) * scale - normaliser[:, None])
                scores = tl.sum(tl.reshape(weights, (TOKENS, GROUP, TILE)), 1)
                if UNSEEN:
                    each = begin + first_token + tl.arange(0, TOKENS)
                    scores = tl.where((at + lane)[None, :] < ((each + 1) // 16 - 1)[:, None], scores, 0.0)
                scores = tl.reshape(scores, (TOKENS, TILE // 4, 4))
                fourth = tl.where(tl.arange(0, 4)[None, None, :] == 3, scores, 0.0)
                block = at // 4 + tl.arange(0, TILE // 4)
                out = target[:, None] * pages + block[None, :]
                tl.store(highest + out, tl.max(scores, 2).to(tl.bfloat16), mask=(block < pages)[None, :])
                tl.store(last + out, tl.max(fourth, 2).to(tl.bfloat16), mask=(block < pages)[None, :])


@triton.jit
def _choose_kernel(
    cu_seqlens, start, highest, last, blocks, count, init_blocks, local_blocks, pages, batch, tile_first,
    out_token, out_head,
    BATCH: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr, WINDOW: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    # `highest` and `last` are read as the bits of non-negative bfloat16 numbers.
    slice_row, group = tl.program_id(0), tl.program_id(1)
    seq, within = _locate(tile_first + slice_row // TOKENS, cu_seqlens, start, batch, BATCH, TOKENS)
    token = within * TOKENS + slice_row % TOKENS
    inside = seq < batch
    opens = tl.load(cu_seqlens + seq, mask=inside, other=0)
    size = tl.load(cu_seqlens + seq + 1, mask=inside, other=0) - opens
    if token < size:
        own = (tl.load(start + seq) + token) // 64
        need = tl.minimum(count, own + 1)
        free = tl.maximum(own - local_blocks, 0)  # the local window begins here
        length = own + 1 - free
        places = need - length
        compared = tl.where(own + 1 > count, free, 0)  # with room for all nothing was scored
        block = tl.arange(0, BLOCKS)
        source = (slice_row.to(tl.int64) * tl.num_programs(1) + group) * pages + block
        scored = (block < compared) & (block >= init_blocks)
        score = tl.load(highest + source, mask=scored, other=0x7FFF).to(tl.int32)
        before = tl.load(last + source - 1, mask=scored & (block > 0), other=0).to(tl.int32)
        score = tl.where(block < free, tl.maximum(score, before), -1)

        bar = tl.where(tl.sum((score >= 0x4000).to(tl.int32), 0) >= places, 0x4000, 0)
        for step in tl.static_range(7):
            shift = 12 - 2 * step
            packed = (score >= bar + (1 << shift)).to(tl.int64)
            packed += (score >= bar + (2 << shift)).to(tl.int64) << 21
            packed += (score >= bar + (3 << shift)).to(tl.int64) << 42
            found = tl.sum(packed, 0)
            steps = ((found & 0x1FFFFF) >= places).to(tl.int32)
            steps += (((found >> 21) & 0x1FFFFF) >= places).to(tl.int32)
            steps += ((found >> 42) >= places).to(tl.int32)
            bar += steps << shift

        above, level = (score > bar).to(tl.int32), (score == bar).to(tl.int32)
        ranks = tl.cumsum(above + (level << 16), 0)
        above_before = (ranks & 0xFFFF) - above
        level_before = ((ranks >> 16) & 0xFFFF) - level
        left = places - tl.sum(above, 0)
        chosen = (above > 0) | ((level > 0) & (level_before < left))
        out = blocks + (opens + token).to(tl.int64) * out_token + group * out_head
        tl.store(out + above_before + tl.minimum(level_before, left), block, mask=chosen)
        local = tl.arange(0, WINDOW)
        tl.store(out + places + local, free + local, mask=local < length)
        slot = tl.arange(0, SLOTS)
        tl.store(out + slot, tl.full((SLOTS,), -1, tl.int32), mask=(slot >= need) & (slot < count))


def _supports(workload: Workload) -> str | None:
    forced = workload["local_blocks"] + 1 + workload["init_blocks"]
    return (
        None if forced <= workload["chosen"] else f"needs room for the {forced} forced blocks, got {workload['chosen']}"
    )


def _heuristic(workload: Workload) -> dict[str, Any]:
    return {"choose_warps": max(1, min(16, workload["context"] // 64 // 512))}


@variant(
    requires=("triton",),
    arch=">=sm_80",
    runs_on=("cuda", "interpreter"),
    tunables={
        "tokens": (4, 8),
        "tile": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (1, 3, 5),
        "choose_warps": (1, 2, 4, 8, 16),
    },
    supports=_supports,
    heuristic=_heuristic,
)
def triton_tiled(
    q: Tensor,
    cu_seqlens: Tensor,
    start: Tensor,
    block_table: Tensor,
    k1_cache: Tensor,
    k2_cache: Tensor,
    blocks: Tensor,
    init_blocks: int,
    local_blocks: int,
    *,
    tokens: int = 8,
    tile: int = 64,
    num_warps: int = 4,
    num_stages: int = 3,
    choose_warps: int = 4,
) -> None:
    """Score `tokens` tokens a program, `tile` compressed keys at a time; then choose, a token and group a program."""
    total, heads, width = q.shape
    batch, pages, groups, count = start.shape[0], block_table.shape[1], k2_cache.shape[1], blocks.shape[-1]
    interpreted = q.device.type == "cpu"
    tiles = min(total, total // tokens + batch)
    step = max(1, min(tiles, SCRATCH // (2 * groups * pages * tokens)))
    highest, last = torch.empty((2, step * tokens, groups, pages), dtype=torch.bfloat16, device=q.device)
    sizes: dict[str, Any] = {"BATCH": triton.next_power_of_2(batch), "TOKENS": tokens}
    for first in range(0, tiles, step):
        part = min(step, tiles - first)
        _score_kernel[(part, groups)](
            q, cu_seqlens, start, block_table, k1_cache, k2_cache, highest, last,
            width**-0.5 * LOG2E, count, local_blocks, pages, batch, first,
            *q.stride()[:2], block_table.stride(0), *k1_cache.stride()[:3], *k2_cache.stride()[:2],
            **sizes, GROUP=heads // groups, DIM=width, TILE=tile, UNSEEN=local_blocks == 0, INTERPRETED=interpreted,
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
        _choose_kernel[(part * tokens, groups)](
            cu_seqlens, start, highest.view(torch.int16), last.view(torch.int16), blocks,
            count, init_blocks, local_blocks, pages, batch, first, *blocks.stride()[:2],
            **sizes, BLOCKS=triton.next_power_of_2(max(1, pages - 1 - local_blocks)),
            WINDOW=triton.next_power_of_2(local_blocks + 1), SLOTS=triton.next_power_of_2(count),
            num_warps=choose_warps,
        )  # fmt: skip
