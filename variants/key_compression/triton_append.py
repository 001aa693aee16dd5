"""One launch: a program takes a block of 64 keys that the piece touches, appends it and completes its windows.

The windows that end in a block reach back at most into the block before. Sums of 16 keys are taken first; k1 is two
of them, k2 eight, in the same order for a prompt and for one token, so that both give the same bits. Keys of
the piece come from the piece and older ones from the cache, so no program reads what another writes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from workbench.variant import variant


@triton.jit
def _bf16(x, INTERPRETED: tl.constexpr):
    # Triton's interpreter truncates where the GPU rounds to nearest even: there, round on the bits.
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)
    return x.to(tl.bfloat16)


@triton.jit
def _append_kernel(
    k, v, cu_seqlens, start, block_table, k_cache, v_cache, k1_cache, k2_cache,
    batch, k_token, k_head, v_token, v_head, table_row,
    kc_page, kc_head, kc_row, vc_page, vc_head, vc_row, k1_page, k1_head, k1_row, k2_page, k2_head,
    BATCH: tl.constexpr, WIDTH: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    # Which sequence and which of its blocks: block counts of all sequences, summed up.
    unit = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    lanes = tl.arange(0, BATCH)
    starts = tl.load(start + lanes, mask=lanes < batch, other=-1)
    opens = tl.load(cu_seqlens + lanes, mask=lanes < batch, other=0)
    closes = tl.load(cu_seqlens + lanes + 1, mask=lanes < batch, other=0)
    sizes = tl.where(starts < 0, 0, closes - opens)
    counts = tl.where(sizes > 0, (starts + sizes - 1) // 64 - starts // 64 + 1, 0)
    upto = tl.cumsum(counts, 0)
    owner = tl.sum((upto <= unit).to(tl.int32), 0)
    if owner < batch:
        first = tl.load(start + owner)
        offset = tl.load(cu_seqlens + owner)
        end = first + tl.load(cu_seqlens + owner + 1) - offset
        block = first // 64 + unit - tl.sum(tl.where(lanes < owner, counts, 0), 0)
        table = block_table + owner.to(tl.int64) * table_row
        page = tl.load(table + block).to(tl.int64)
        columns = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)

        # Append.
        rows = tl.arange(0, 64)
        positions = block * 64 + rows
        new = ((positions >= first) & (positions < end))[:, None]
        token = (offset + positions - first).to(tl.int64)[:, None]
        keys = tl.load(k + token * k_token + head * k_head + columns[None, :], mask=new, other=0.0)
        tl.store(k_cache + page * kc_page + head * kc_head + rows[:, None] * kc_row + columns[None, :], keys, mask=new)
        values = tl.load(v + token * v_token + head * v_head + columns[None, :], mask=new, other=0.0)
        tl.store(
            v_cache + page * vc_page + head * vc_head + rows[:, None] * vc_row + columns[None, :], values, mask=new
        )

        # Windows that end in this block end at its keys 15, 31, 47 and 63; number i begins 16·i after the block before.
        from_last = tl.maximum(first - block * 64, 0)  # keys of this block that are older than the piece
        to_last = tl.minimum(end - block * 64, 64)
        if to_last // 16 > from_last // 16:
            oldest = block * 64 + 16 * (from_last // 16) - 16
            if to_last == 64:
                oldest = block * 64 - 64
            back = block * 64 - 64 + tl.arange(0, 128)
            wanted = (back >= tl.maximum(oldest, 0)) & (back < end)
            recent = (wanted & (back >= first))[:, None]
            given = (offset + back - first).to(tl.int64)[:, None]
            window = tl.load(k + given * k_token + head * k_head + columns[None, :], mask=recent, other=0.0).to(
                tl.float32
            )
            older = wanted & (back < first)
            where = tl.load(table + back // 64, mask=older, other=0).to(tl.int64)[:, None]
            place = where * kc_page + head * kc_head + (back % 64)[:, None] * kc_row + columns[None, :]
            window += tl.load(k_cache + place, mask=older[:, None], other=0.0).to(tl.float32)
            sums = tl.sum(tl.reshape(window, (8, 16, WIDTH)), 1)
            before = tl.load(table + block - 1, mask=block > 0, other=0).to(tl.int64)
            number = tl.arange(0, 8)
            pair = (number[None, :] == number[:, None]) | (number[None, :] == number[:, None] + 1)
            two = tl.sum(tl.where(pair[:, :, None], sums[None, :, :], 0.0), 1)
            last = 16 * number - 33
            ends = (number > 2) & (number < 7) & (last >= from_last) & (last < to_last) & (block * 4 - 4 + number >= 0)
            target = tl.where(number == 3, before * k1_page + 3 * k1_row, page * k1_page + (number - 4) * k1_row)
            target = (target + head * k1_head)[:, None] + columns[None, :]
            tl.store(k1_cache + target, _bf16(two * (1.0 / 32), INTERPRETED), mask=ends[:, None])
            if (to_last == 64) & (block > 0):
                mean = _bf16(tl.sum(sums, 0) * (1.0 / 128), INTERPRETED)
                tl.store(k2_cache + before * k2_page + head * k2_head + columns, mean)


@variant(
    requires=("triton",),
    arch=">=sm_80",
    runs_on=("cuda", "interpreter"),
    tunables={"width": (32, 64, 128), "num_warps": (1, 2, 4, 8)},
)
def triton_append(
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    start: Tensor,
    block_table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k1_cache: Tensor,
    k2_cache: Tensor,
    *,
    width: int = 64,
    num_warps: int = 4,
) -> None:
    """Append and complete in one launch, `width` of the 128 channels a program."""
    tokens, heads, channels = k.shape
    interpreted = k.device.type == "cpu"
    width = channels if interpreted else width  # the interpreter pays by the program
    batch = start.shape[0]
    # A piece of t tokens touches at most (t − 1) // 64 + 2 blocks.
    units = min(tokens, tokens // 64 + 2 * batch)
    _append_kernel[(units, heads, channels // width)](
        k, v, cu_seqlens, start, block_table, k_cache, v_cache, k1_cache, k2_cache,
        batch, *k.stride()[:2], *v.stride()[:2], block_table.stride(0),
        *k_cache.stride()[:3], *v_cache.stride()[:3], *k1_cache.stride()[:3], *k2_cache.stride()[:2],
        BATCH=triton.next_power_of_2(batch), WIDTH=width, INTERPRETED=interpreted, num_warps=num_warps,
    )  # fmt: skip
