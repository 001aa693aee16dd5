"""What the decode variants that split the keys share: the rounding, and the kernel that merges the parts."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(x, INTERPRETED: tl.constexpr):
    # To bfloat16 and back. Triton's interpreter truncates where a GPU rounds to nearest even, so there the rounding
    # is done on the bits.
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return bits.to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def merge_kernel(
    parts,
    sums,
    gate,
    lengths,
    out,
    gate_row,
    out_row,
    heads,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    # parts [sequence, head, split, DIM] float32 and sums [sequence, head, split, (maximum, sum)] to the gated row.
    sequence = tl.program_id(1).to(tl.int64)
    if tl.load(lengths + sequence) < 0:
        return
    head, split, dim = tl.program_id(0) * HEADS + tl.arange(0, HEADS), tl.arange(0, WIDTH), tl.arange(0, DIM)
    place = (sequence * heads + head[None, :]) * SPLITS + split[:, None]
    there = split[:, None] < SPLITS
    top = tl.load(sums + place * 2, mask=there, other=float("-inf"))
    total = tl.load(sums + place * 2 + 1, mask=there, other=0.0)
    part = tl.load(parts + place[:, :, None] * DIM + dim[None, None, :], mask=there[:, :, None], other=0.0)
    weight = tl.exp2(top - tl.max(top, 0)[None, :])
    mean = tl.sum(part * weight[:, :, None], 0) / tl.sum(total * weight, 0)[:, None]
    column = head[:, None] * DIM + dim[None, :]
    opened = tl.sigmoid(tl.load(gate + sequence * gate_row + column).to(tl.float32))
    gated = rounded(mean, INTERPRETED) * rounded(opened, INTERPRETED)
    tl.store(out + sequence * out_row + column, rounded(gated, INTERPRETED).to(tl.bfloat16))
