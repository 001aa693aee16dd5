"""One Triton kernel: causal attention over pages with a running softmax, 16 heads of a few tokens a tile.

A program takes some tokens of one sequence and key-value head; the rows of its tile are their 16 query heads
each. It walks the pages that all its tokens see without a mask, then the rest with one, and gates. Tiles are found
from `cu_seqlens` on the device; the last, which see the most, start first.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from workbench.contract import Workload
from workbench.variant import variant

PAGE, GROUP, DIM = 64, 16, 128
INTERPRETED_TILE, INTERPRETED_STEP = 32, 4
"""Tokens of a tile, and pages taken at once, under Triton's interpreter, which pays by the operation."""


@triton.jit
def _rounded(x, INTERPRETED: tl.constexpr):
    # To bfloat16 and back. Triton's interpreter truncates where a GPU rounds to nearest even, so there the rounding
    # is done on the bits.
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return bits.to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _attend(
    top, total, mean, query, first, last, limit, position, k_base, v_base, k_page, k_key, v_page, v_key, table, scale,
    MASKED: tl.constexpr, STEP: tl.constexpr, PAGE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    # Running softmax over the keys first … last-1; `limit` is the number of keys there are.
    key = tl.arange(0, STEP * PAGE)
    within = key % PAGE
    # The pages of the next step are looked up one step ahead: addresses that wait for nothing can be pipelined.
    page = tl.load(table + (first + key) // PAGE, mask=first + key < limit, other=0).to(tl.int64)
    for begin in range(first, last, STEP * PAGE):
        index = begin + key
        if MASKED:
            k_at = k_base + (page * k_page + within * k_key)[:, None]
            v_at = v_base + (page * v_page + within * v_key)[:, None]
            keys = tl.load(k_at, mask=(index < limit)[:, None], other=0.0)
            values = tl.load(v_at, mask=(index < limit)[:, None], other=0.0)
        else:
            keys = tl.load(k_base + (page * k_page + within * k_key)[:, None])
            values = tl.load(v_base + (page * v_page + within * v_key)[:, None])
        ahead = index + STEP * PAGE
        page = tl.load(table + ahead // PAGE, mask=ahead < limit, other=0).to(tl.int64)
        if INTERPRETED:
            logits = tl.dot(query.to(tl.float32), tl.trans(keys.to(tl.float32))) * scale
        else:
            logits = tl.dot(query, tl.trans(keys)) * scale
        if MASKED:
            logits = tl.where(index[None, :] <= position[:, None], logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        weights = tl.exp2(logits - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weights, 1)
        if INTERPRETED:
            mean = mean * fade[:, None] + tl.dot(_rounded(weights, INTERPRETED), values.to(tl.float32))
        else:
            mean = tl.dot(weights.to(tl.bfloat16), values, mean * fade[:, None])
        top = higher
    return top, total, mean


@triton.jit
def _flash_kernel(
    q,
    gate,
    cu_seqlens,
    start,
    block_table,
    k_cache,
    v_cache,
    out,
    batch,
    q_row,
    q_head,
    gate_row,
    table_row,
    k_page,
    k_head,
    k_key,
    v_page,
    v_head,
    v_key,
    out_row,
    scale,
    BATCH: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    # Which sequence, and which of its tiles: tiles of all sequences are numbered through.
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    each = tl.arange(0, BATCH)
    cut = tl.load(cu_seqlens + each, mask=each < batch, other=0)
    count = tl.load(cu_seqlens + each + 1, mask=each < batch, other=0) - cut
    tiles = (count + TILE - 1) // TILE
    ends = tl.cumsum(tiles, 0)
    if tile >= tl.sum(tiles, 0):
        return
    sequence = tl.sum((ends <= tile).to(tl.int32), 0)
    mine = each == sequence
    token = (tile - tl.sum(tl.where(mine, ends - tiles, 0), 0)) * TILE
    length = tl.sum(tl.where(mine, count, 0), 0)
    begun = tl.load(start + sequence)
    if begun < 0:
        return

    row, dim = tl.arange(0, TILE * GROUP), tl.arange(0, DIM)
    local = token + row // GROUP
    inside = local < length
    line = (tl.sum(tl.where(mine, cut, 0), 0) + local).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    query = tl.load(q + (line * q_row + head * q_head)[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
    position = begun + local
    table = block_table + sequence.to(tl.int64) * table_row
    k_base = k_cache + kv_head * k_head + dim[None, :]
    v_base = v_cache + kv_head * v_head + dim[None, :]
    # Keys that every token sees, in whole steps; then the rest, up to the last token's own.
    whole = (begun + token + 1) // (STEP * PAGE) * (STEP * PAGE)
    last = begun + tl.minimum(token + TILE, length)
    top = tl.full((TILE * GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((TILE * GROUP,), tl.float32)
    mean = tl.zeros((TILE * GROUP, DIM), tl.float32)
    top, total, mean = _attend(
        top, total, mean, query, 0, whole, last, position, k_base, v_base, k_page, k_key, v_page, v_key, table, scale,
        False, STEP, PAGE, INTERPRETED,
    )  # fmt: skip
    top, total, mean = _attend(
        top, total, mean, query, whole, last, last, position, k_base, v_base, k_page, k_key, v_page, v_key, table,
        scale, True, STEP, PAGE, INTERPRETED,
    )  # fmt: skip

    column = (head * DIM)[:, None] + dim[None, :]
    opened = tl.load(gate + (line * gate_row)[:, None] + column, mask=inside[:, None], other=0.0).to(tl.float32)
    gated = _rounded(mean / total[:, None], INTERPRETED) * _rounded(tl.sigmoid(opened), INTERPRETED)
    result = _rounded(gated, INTERPRETED).to(tl.bfloat16)
    tl.store(out + (line * out_row)[:, None] + column, result, mask=inside[:, None])


def choose(workload: Workload) -> dict[str, Any]:
    """Tiles of 128 rows; of 64 where pieces are so short that there would be few."""
    few = workload["batch"] * workload["tokens"] < 2048
    return {"tile": 4, "num_warps": 4} if few else {"tile": 8, "num_warps": 8}


@variant(
    requires=("triton",),
    arch=">=sm_80",
    runs_on=("cuda", "interpreter"),
    tunables={"tile": (4, 8, 16), "step": (1, 2), "num_warps": (4, 8), "num_stages": (2, 3, 4, 5)},
    heuristic=choose,
)
def triton_flash(
    q: Tensor,
    gate: Tensor,
    cu_seqlens: Tensor,
    start: Tensor,
    block_table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    *,
    tile: int = 8,
    step: int = 1,
    num_warps: int = 8,
    num_stages: int = 3,
) -> None:
    """Attend and gate. `tile`: tokens of a program; `step`: pages taken at once."""
    tokens, _, dim = q.shape
    batch = start.shape[0]
    interpreted = q.device.type != "cuda"
    if interpreted:
        tile, step = INTERPRETED_TILE, INTERPRETED_STEP
    _flash_kernel[(triton.cdiv(tokens, tile) + batch, k_cache.shape[1])](
        q,
        gate,
        cu_seqlens,
        start,
        block_table,
        k_cache,
        v_cache,
        out,
        batch,
        *q.stride()[:2],
        gate.stride(0),
        block_table.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        out.stride(0),
        dim**-0.5 * 1.4426950408889634,
        BATCH=triton.next_power_of_2(batch),
        TILE=tile,
        STEP=step,
        PAGE=PAGE,
        GROUP=GROUP,
        DIM=DIM,
        INTERPRETED=interpreted,
        num_warps=num_warps,
        num_stages=num_stages,
    )
