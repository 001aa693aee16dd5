"""Triton: the blocks that a few neighbouring tokens chose are listed once, then attended to together.

Neighbouring tokens choose mostly the same blocks, and a block read once for all of them saves the cache's bandwidth.
Two small kernels merge the sorted lists of a tile's tokens into one, each entry with a bit for every token that
chose it; the third walks that list, with the 16 query heads of each token as rows of a tile, and masks the rows of
tokens that did not choose the block. Tiles are found from `cu_seqlens` on the device.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench.contract import Workload
from workbench.variant import variant

PAGE, GROUP, DIM = 64, 16, 128
MEMBERS = 8
"""Bits of a list entry that say which tokens of the tile chose the block; the block is above them."""
INTERPRETED_STEP = 16
"""List entries taken at once, of tiles as large as can be, under Triton's interpreter, which pays by the operation."""


@triton.jit
def _locate(cu_seqlens, batch, tile, BATCH: tl.constexpr, TILE: tl.constexpr):
    # Sequence of a tile (`batch` for a tile too many), its first row, and its number of tokens.
    each = tl.arange(0, BATCH)
    cut = tl.load(cu_seqlens + each, mask=each < batch, other=0)
    count = tl.load(cu_seqlens + each + 1, mask=each < batch, other=0) - cut
    tiles = (count + TILE - 1) // TILE
    ends = tl.cumsum(tiles, 0)
    sequence = tl.sum(((ends <= tile) & (each < batch)).to(tl.int32), 0)
    mine = each == sequence
    token = (tile - tl.sum(tl.where(mine, ends - tiles, 0), 0)) * TILE
    length = tl.sum(tl.where(mine, count, 0), 0)
    return sequence, tl.sum(tl.where(mine, cut, 0), 0), token, tl.minimum(TILE, length - token)


@triton.jit
def _list_kernel(
    cu_seqlens,
    start,
    blocks,
    ranks,
    entries,
    counts,
    batch,
    width,
    blocks_row,
    blocks_head,
    BATCH: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    SECOND: tl.constexpr,
):
    # Launched twice. First: `ranks`, how many blocks a token is the first of its tile to choose, up to and with each
    # of its own. Second: each block goes where the number of smaller ones in the union puts it, written by the first
    # token that chose it.
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence, cut, token, tokens = _locate(cu_seqlens, batch, tile, BATCH, TILE)
    if sequence >= batch:
        return
    if tl.load(start + sequence) < 0:
        return
    one, slot = tl.arange(0, TILE)[:, None], tl.arange(0, WIDTH)[None, :]
    lists = blocks + (cut + token).to(tl.int64) * blocks_row + kv_head * blocks_head
    mine = tl.load(lists + one * blocks_row + slot, mask=slot < tl.where(one < tokens, width, 0), other=-1)
    number = kv_head * tl.num_programs(0) + tile
    rows = number.to(tl.int64) * TILE * WIDTH
    chose = tl.zeros((TILE, WIDTH), tl.int32)
    place = tl.zeros((TILE, WIDTH), tl.int32)
    listed = 0
    for other in range(TILE):
        theirs = lists + other * blocks_row
        used = tl.where(other < tokens, width, 0)
        # How many of that token's blocks are smaller: a binary search, in which -1 in the tail counts as last.
        below = tl.zeros((TILE, WIDTH), tl.int32)
        for step in tl.static_range(STEPS):
            probe = below + (WIDTH >> step)
            there = tl.load(theirs + probe - 1, mask=probe <= used, other=-1)
            below = tl.where(there >= 0, tl.where(there < mine, probe, below), below)
        there = tl.load(theirs + below, mask=below < used, other=-1)
        chose += tl.where(there == mine, 1, 0) << other
        if SECOND:
            place += tl.load(ranks + rows + other * WIDTH + below - 1, mask=below > 0, other=0)
            listed += tl.load(ranks + rows + other * WIDTH + WIDTH - 1)
    earlier = chose & ((1 << one) - 1)
    first = tl.where(mine >= 0, tl.where(earlier == 0, 1, 0), 0)
    if SECOND:
        tl.store(entries + rows + place, (mine << MEMBERS) | chose, mask=first != 0)
        tl.store(counts + number, listed)
    else:
        tl.store(ranks + rows + one * WIDTH + slot, tl.cumsum(first, 1))


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
def _attend_kernel(
    q,
    gate,
    cu_seqlens,
    start,
    block_table,
    k_cache,
    v_cache,
    out,
    entries,
    counts,
    batch,
    room,
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
    MEMBERS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence, cut, token, tokens = _locate(cu_seqlens, batch, tile, BATCH, TILE)
    if sequence >= batch:
        return
    begun = tl.load(start + sequence)
    if begun < 0:
        return
    row, dim, key = tl.arange(0, TILE * GROUP), tl.arange(0, DIM), tl.arange(0, STEP * PAGE)
    local = row // GROUP
    inside = local < tokens
    line = (cut + token + local).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    query = tl.load(q + (line * q_row + head * q_head)[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
    position = begun + token + local
    newest = begun + token + tokens - 1
    within = key % PAGE
    table = block_table + sequence.to(tl.int64) * table_row
    k_base = k_cache + kv_head * k_head + dim[None, :]
    v_base = v_cache + kv_head * v_head + dim[None, :]
    number = kv_head * tl.num_programs(0) + tile
    mine = entries + number.to(tl.int64) * room
    listed = tl.load(counts + number)

    top = tl.full((TILE * GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((TILE * GROUP,), tl.float32)
    mean = tl.zeros((TILE * GROUP, DIM), tl.float32)
    # Entry and page of the next step are looked up one step ahead: addresses that wait for nothing can be pipelined.
    at = key // PAGE
    entry = tl.load(mine + at, mask=at < listed, other=0)
    page = tl.load(table + (entry >> MEMBERS), mask=at < listed, other=0).to(tl.int64)
    for first in range(0, listed, STEP):
        # An entry past the end has no members; keys past the tile's newest may not exist.
        index = (entry >> MEMBERS) * PAGE + within
        exists = tl.where(at < listed, index, newest + 1) <= newest
        keys = tl.load(k_base + (page * k_page + within * k_key)[:, None], mask=exists[:, None], other=0.0)
        values = tl.load(v_base + (page * v_page + within * v_key)[:, None], mask=exists[:, None], other=0.0)
        # A key that the row's token did not choose lies beyond every position.
        chosen = (entry[None, :] >> local[:, None]) & 1
        seen = tl.where(chosen != 0, index[None, :], newest + 1) <= position[:, None]
        at = first + STEP + key // PAGE
        entry = tl.load(mine + at, mask=at < listed, other=0)
        page = tl.load(table + (entry >> MEMBERS), mask=at < listed, other=0).to(tl.int64)
        if INTERPRETED:
            logits = tl.dot(query.to(tl.float32), tl.trans(keys.to(tl.float32))) * scale
        else:
            logits = tl.dot(query, tl.trans(keys)) * scale
        logits = tl.where(seen, logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(logits - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(weights, 1)
        if INTERPRETED:
            bits = weights.to(tl.int32, bitcast=True)  # as in _rounded; a call costs the interpreter milliseconds
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
            mean = mean * fade[:, None] + tl.dot(bits.to(tl.float32, bitcast=True), values.to(tl.float32))
        else:
            mean = tl.dot(weights.to(tl.bfloat16), values, mean * fade[:, None])
        top = higher

    column = (head * DIM)[:, None] + dim[None, :]
    opened = tl.load(gate + (line * gate_row)[:, None] + column, mask=inside[:, None], other=0.0).to(tl.float32)
    mean = mean / tl.where(inside, total, 1.0)[:, None]
    gated = _rounded(mean, INTERPRETED) * _rounded(tl.sigmoid(opened), INTERPRETED)
    result = _rounded(gated, INTERPRETED).to(tl.bfloat16)
    tl.store(out + (line * out_row)[:, None] + column, result, mask=inside[:, None])


def choose(workload: Workload) -> dict[str, Any]:
    """Four tokens together where neighbours agree, one where each chooses alone and most blocks are chosen freely."""
    alone = workload["overlap"] < 30 and workload["context"] > 4 * PAGE * workload["topk_blocks"]
    return {"tile": 2 if alone else 4}


@variant(
    requires=("triton",),
    arch=">=sm_80",
    runs_on=("cuda", "interpreter"),
    tunables={"tile": (1, 2, 4, 8), "step": (1, 2), "num_warps": (2, 4, 8), "num_stages": (2, 3, 4, 5)},
    heuristic=choose,
)
def triton_union(
    q: Tensor,
    gate: Tensor,
    cu_seqlens: Tensor,
    start: Tensor,
    block_table: Tensor,
    blocks: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    *,
    tile: int = 4,
    step: int = 1,
    num_warps: int = 4,
    num_stages: int = 3,
) -> None:
    """List the blocks of each tile, then attend and gate. `tile`: tokens together; `step`: blocks taken at once."""
    tokens, _, dim = q.shape
    batch, kv_heads = start.shape[0], k_cache.shape[1]
    # A token uses no more entries than its sequence has blocks; they come first, the rest of the list is -1.
    width = min(blocks.shape[2], block_table.shape[1])
    interpreted = q.device.type != "cuda"
    if interpreted:
        tile, step = MEMBERS, INTERPRETED_STEP
    tiles = triton.cdiv(tokens, tile) + batch
    padded = triton.next_power_of_2(width)
    ranks, entries = torch.empty(2, kv_heads, tiles, tile * padded, dtype=torch.int32, device=q.device)
    counts = torch.empty(kv_heads, tiles, dtype=torch.int32, device=q.device)
    rounded_batch = triton.next_power_of_2(batch)
    for second in (False, True):
        _list_kernel[(tiles, kv_heads)](
            cu_seqlens,
            start,
            blocks,
            ranks,
            entries,
            counts,
            batch,
            width,
            *blocks.stride()[:2],
            BATCH=rounded_batch,
            TILE=tile,
            WIDTH=padded,
            STEPS=padded.bit_length(),
            MEMBERS=MEMBERS,
            SECOND=second,
            num_warps=4,
        )
    _attend_kernel[(tiles, kv_heads)](
        q,
        gate,
        cu_seqlens,
        start,
        block_table,
        k_cache,
        v_cache,
        out,
        entries,
        counts,
        batch,
        tile * padded,
        *q.stride()[:2],
        gate.stride(0),
        block_table.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        out.stride(0),
        dim**-0.5 * 1.4426950408889634,
        BATCH=rounded_batch,
        TILE=tile,
        STEP=step,
        PAGE=PAGE,
        GROUP=GROUP,
        DIM=DIM,
        MEMBERS=MEMBERS,
        INTERPRETED=interpreted,
        num_warps=num_warps,
        num_stages=num_stages,
    )
