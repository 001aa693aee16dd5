"""Three launches, each spread over the context: normaliser over k2, block scores from k1, choice.

Scores of single compressed keys never reach memory: a program reduces its 64 windows to 16 blocks. A block's five
windows straddle two blocks, so two numbers are stored a block, the maximum of windows 4b … 4b+3 and window 4b+3
alone, which the choice also counts for the next block. The choice finds the last score that gets in two bits at a
time (scores are not negative, so their bits order as they do) and ranks by one prefix sum, lower blocks first.
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


@triton.jit
def _dot(q, k, INTERPRETED: tl.constexpr):
    # q·kᵀ; Triton's interpreter does not know bfloat16 products.
    if INTERPRETED:
        return tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)))
    return tl.dot(q, tl.trans(k))


@triton.jit
def _normaliser_kernel(
    q, lengths, block_table, k2_cache, partial, scale, count,
    q_seq, q_head, table_row, k2_page, k2_head,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    # Largest logit and sum of exponentials, base 2, of this program's share of the visible k2, for each head.
    pair, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    seq, group = (pair // GROUPS).to(tl.int64), pair % GROUPS
    n = tl.load(lengths + seq)
    if (n - 1) // 64 + 1 > count:
        heads, columns = tl.arange(0, GROUP), tl.arange(0, DIM)
        queries = tl.load(q + seq * q_seq + (group * GROUP + heads)[:, None] * q_head + columns[None, :])
        visible = n // 64 - 1
        share = (visible + TILE * splits - 1) // (TILE * splits) * TILE
        begin = split * share
        top = tl.full((GROUP,), -float("inf"), tl.float32)
        total = tl.zeros((GROUP,), tl.float32)
        for first in range(begin, tl.minimum(begin + share, visible), TILE):
            rows = first + tl.arange(0, TILE)
            page = tl.load(block_table + seq * table_row + tl.minimum(rows, visible - 1)).to(tl.int64)
            keys = tl.load(k2_cache + page[:, None] * k2_page + group * k2_head + columns[None, :])
            logits = _dot(queries, keys, INTERPRETED) * scale
            logits = tl.where((rows < visible)[None, :], logits, -float("inf"))
            higher = tl.maximum(top, tl.max(logits, 1))
            total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(logits - higher[:, None]), 1)
            top = higher
        out = partial + (pair * splits + split) * 2 * GROUP + heads
        tl.store(out, top)
        tl.store(out + GROUP, total)


@triton.jit
def _score_kernel(
    q, lengths, block_table, k1_cache, partial, highest, last, scale, count, local_blocks, pages,
    q_seq, q_head, table_row, k1_page, k1_head, k1_row,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, PARTIALS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    # Block scores of this program's share of the free blocks, TILE windows at a time.
    pair, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    seq, group = (pair // GROUPS).to(tl.int64), pair % GROUPS
    n = tl.load(lengths + seq)
    own = (n - 1) // 64
    if own + 1 > count:
        heads, columns, parts = tl.arange(0, GROUP), tl.arange(0, DIM), tl.arange(0, PARTIALS)
        queries = tl.load(q + seq * q_seq + (group * GROUP + heads)[:, None] * q_head + columns[None, :])
        where = partial + (pair * PARTIALS + parts)[:, None] * 2 * GROUP + heads[None, :]
        tops = tl.load(where)
        top = tl.max(tops, 0)
        total = tl.sum(tl.exp2(tops - top[None, :]) * tl.load(where + GROUP), 0)
        normaliser = top + tl.log2(total)

        visible = n // 16 - 1
        wanted = tl.minimum((own - local_blocks) * 4, visible)
        share = (wanted + TILE * splits - 1) // (TILE * splits) * TILE
        begin = split * share
        for first in range(begin, tl.minimum(begin + share, wanted), TILE):
            rows = first + tl.arange(0, TILE)
            existing = tl.minimum(rows, visible - 1)
            page = tl.load(block_table + seq * table_row + existing // 4).to(tl.int64)
            place = page[:, None] * k1_page + group * k1_head + (existing % 4)[:, None] * k1_row + columns[None, :]
            keys = tl.load(k1_cache + place)
            weights = tl.exp2(_dot(queries, keys, INTERPRETED) * scale - normaliser[:, None])
            scores = tl.sum(weights, 0)
            scores = tl.reshape(tl.where(rows < visible, scores, 0.0), (TILE // 4, 4))
            fourth = tl.where(tl.arange(0, 4)[None, :] == 3, scores, 0.0)
            block = first // 4 + tl.arange(0, TILE // 4)
            target = pair.to(tl.int64) * pages + block
            tl.store(highest + target, tl.max(scores, 1).to(tl.bfloat16), mask=block < pages)
            tl.store(last + target, tl.max(fourth, 1).to(tl.bfloat16), mask=block < pages)


@triton.jit
def _choose_kernel(
    lengths, highest, last, blocks, count, init_blocks, local_blocks, pages, out_seq, out_head,
    GROUPS: tl.constexpr, BLOCKS: tl.constexpr, WINDOW: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    # `highest` and `last` are read as the bits of non-negative bfloat16 numbers.
    pair = tl.program_id(0)
    seq, group = (pair // GROUPS).to(tl.int64), pair % GROUPS
    n = tl.load(lengths + seq)
    if n > 0:
        own = (n - 1) // 64
        need = tl.minimum(count, own + 1)
        free = tl.maximum(own - local_blocks, 0)  # the local window begins here
        window = own + 1 - free
        places = need - window
        block = tl.arange(0, BLOCKS)
        source = pair.to(tl.int64) * pages + block
        compared = tl.where(own + 1 > count, free, 0)  # with room for all nothing was scored
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
        out = blocks + seq * out_seq + group * out_head
        tl.store(out + above_before + tl.minimum(level_before, left), block, mask=chosen)
        local = tl.arange(0, WINDOW)
        tl.store(out + places + local, free + local, mask=local < window)
        slot = tl.arange(0, SLOTS)
        tl.store(out + slot, tl.full((SLOTS,), -1, tl.int32), mask=(slot >= need) & (slot < count))


def _supports(workload: Workload) -> str | None:
    forced = workload["local_blocks"] + 1 + workload["init_blocks"]
    return (
        None if forced <= workload["chosen"] else f"needs room for the {forced} forced blocks, got {workload['chosen']}"
    )


def _heuristic(workload: Workload) -> dict[str, Any]:
    return {"choose_warps": max(1, min(16, workload["context"] // 64 // 256))}


@variant(
    requires=("triton",),
    arch=">=sm_80",
    runs_on=("cuda", "interpreter"),
    tunables={
        "programs": (132, 264, 528),
        "tile": (32, 64, 128),
        "num_warps": (2, 4),
        "num_stages": (3, 5, 7),
        "choose_warps": (1, 2, 4, 8, 16, 32),
    },
    supports=_supports,
    heuristic=_heuristic,
)
def triton_split(
    q: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    k1_cache: Tensor,
    k2_cache: Tensor,
    blocks: Tensor,
    init_blocks: int,
    local_blocks: int,
    *,
    programs: int = 264,
    tile: int = 64,
    num_warps: int = 4,
    num_stages: int = 5,
    choose_warps: int = 8,
) -> None:
    """Score with about `programs` programs, each an equal share of its sequence's compressed keys."""
    batch, heads, width = q.shape
    groups, pages, count = k2_cache.shape[1], block_table.shape[1], blocks.shape[-1]
    pairs = batch * groups
    interpreted = q.device.type == "cpu"
    spread = 2 if interpreted else triton.next_power_of_2(max(1, programs // pairs))
    splits = max(1, min(spread, triton.next_power_of_2(triton.cdiv(4 * pages, tile))))
    partials = max(1, min(spread, triton.next_power_of_2(triton.cdiv(pages, tile))))
    partial = torch.empty((pairs, partials, 2, heads // groups), dtype=torch.float32, device=q.device)
    highest, last = torch.empty((2, pairs, pages), dtype=torch.bfloat16, device=q.device)
    sizes: dict[str, Any] = {"GROUPS": groups, "GROUP": heads // groups, "DIM": width, "TILE": tile}
    launch: dict[str, Any] = {"INTERPRETED": interpreted, "num_warps": num_warps, "num_stages": num_stages}
    scale = width**-0.5 * LOG2E
    _normaliser_kernel[(pairs, partials)](
        q, lengths, block_table, k2_cache, partial, scale, count,
        *q.stride()[:2], block_table.stride(0), *k2_cache.stride()[:2], **sizes, **launch,
    )  # fmt: skip
    _score_kernel[(pairs, splits)](
        q, lengths, block_table, k1_cache, partial, highest, last, scale, count, local_blocks, pages,
        *q.stride()[:2], block_table.stride(0), *k1_cache.stride()[:3], **sizes, PARTIALS=partials, **launch,
    )  # fmt: skip
    _choose_kernel[(pairs,)](
        lengths, highest.view(torch.int16), last.view(torch.int16), blocks,
        count, init_blocks, local_blocks, pages, *blocks.stride()[:2],
        GROUPS=groups, BLOCKS=triton.next_power_of_2(max(1, pages - 1 - local_blocks)),
        WINDOW=triton.next_power_of_2(local_blocks + 1), SLOTS=triton.next_power_of_2(count), num_warps=choose_warps,
    )  # fmt: skip
