"""Three Triton kernels: norm and rotate, the chunk-wise recurrence, norm and gate.

The first writes q and k, normed and rotated, to a scratch buffer, so that a token's sines are computed once for all
heads. The second takes one head of one sequence and `block_v` of its values, and goes through the chunks of 64
tokens with its slice of the state in registers: o = λ^(i+1)·(q S) + (q kᵀ ⊙ λ^(i−j)) v, then the state is carried
on. Decays are powers of differences only (λ^−64 of the fastest head overflows). The third norms each row of `out`
over all heads and gates it, in place. Everything is read on the device, so the launches can be captured in a graph.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench.contract import Workload
from workbench.variant import variant

EPS = 1e-6
THETA = 10000.0
CHUNK = 64


@triton.jit
def _bf16(x, INTERPRETED: tl.constexpr):
    # Round to bfloat16 and widen again. Triton's interpreter truncates where the GPU rounds to nearest even, so
    # there the rounding is done on the bits.
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return bits.to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _operand(x, INTERPRETED: tl.constexpr):
    # A bfloat16 operand of a matrix product; the interpreter multiplies the bits of that type as integers.
    if INTERPRETED:
        return _bf16(x.to(tl.float32), INTERPRETED)
    return x.to(tl.bfloat16)


@triton.jit
def _owner(rows, cu_seqlens, start, slots, batch, BATCH: tl.constexpr):
    # Whether packed rows [ROWS] belong to a sequence that is not padding, and at which positions they stand.
    lanes = tl.arange(0, BATCH)
    ends = tl.load(cu_seqlens + 1 + lanes, mask=lanes < batch, other=2147483647)
    sequence = tl.sum((ends[None, :] <= rows[:, None]).to(tl.int32), 1)
    known = sequence < batch
    slot = tl.load(slots + sequence, mask=known, other=-1)
    begin = tl.load(cu_seqlens + sequence, mask=known, other=0)
    first = tl.load(start + sequence, mask=known, other=0)
    return slot >= 0, first + rows - begin


@triton.jit
def _rotate_kernel(
    qkvz,
    q_norm,
    k_norm,
    cu_seqlens,
    start,
    slots,
    frequencies,
    rotated,
    qkvz_stride,
    tokens,
    batch,
    eps,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    BATCH: tl.constexpr,
    ROWS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live, positions = _owner(rows, cu_seqlens, start, slots, batch, BATCH)
    half = tl.arange(0, DIM // 2)
    heads = tl.arange(0, HEADS_PADDED)
    inside = live[:, None, None] & (heads < HEADS)[None, :, None]
    angle = positions.to(tl.float32)[:, None] * tl.load(frequencies + half)[None, :]
    cos = tl.cos(angle)[:, None, :]
    sin = tl.sin(angle)[:, None, :]
    tile = (heads[:, None] * DIM + half[None, :])[None, :, :]
    for which in tl.static_range(2):
        weight = q_norm if which == 0 else k_norm
        source = qkvz + (rows.to(tl.int64) * qkvz_stride)[:, None, None] + which * HEADS * DIM + tile
        first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + DIM // 2, mask=inside, other=0.0).to(tl.float32)
        mean_square = (tl.sum(first * first, 2) + tl.sum(second * second, 2)) / DIM
        inverse = (1.0 / tl.sqrt_rn(mean_square + eps))[:, :, None]
        first_weight = tl.load(weight + half).to(tl.float32)[None, None, :]
        second_weight = tl.load(weight + DIM // 2 + half).to(tl.float32)[None, None, :]
        first = _bf16(_bf16(first * inverse, INTERPRETED) * first_weight, INTERPRETED)
        second = _bf16(_bf16(second * inverse, INTERPRETED) * second_weight, INTERPRETED)
        target = rotated + ((which * tokens + rows).to(tl.int64) * (HEADS * DIM))[:, None, None] + tile
        tl.store(target, _bf16(first * cos - second * sin, INTERPRETED).to(tl.bfloat16), mask=inside)
        tl.store(target + DIM // 2, _bf16(second * cos + first * sin, INTERPRETED).to(tl.bfloat16), mask=inside)


@triton.jit
def _chunk_kernel(
    q_rotated,
    k_rotated,
    qkvz,
    cu_seqlens,
    start,
    slots,
    log_decays,
    state,
    out,
    qkvz_stride,
    state_slot_stride,
    state_head_stride,
    state_key_stride,
    out_stride,
    scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    sequence = tl.program_id(2)
    head = tl.program_id(1)
    slot = tl.load(slots + sequence).to(tl.int64)
    begin = tl.load(cu_seqlens + sequence)
    length = tl.load(cu_seqlens + sequence + 1) - begin
    if (slot < 0) | (length <= 0):
        return
    WIDTH: tl.constexpr = HEADS * DIM
    inside = tl.arange(0, CHUNK)
    channels = tl.arange(0, DIM)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)

    place = state + slot * state_slot_stride + head.to(tl.int64) * state_head_stride
    place = place + channels[:, None] * state_key_stride + values[None, :]
    begun = tl.zeros([DIM, BLOCK_V], tl.int32) + tl.load(start + sequence) > 0
    carried = tl.load(place, mask=begun, other=0.0)  # a fresh sequence begins from zero, not from its slot

    log_decay = tl.load(log_decays + head)  # of base 2
    difference = inside[:, None] - inside[None, :]
    triangle = tl.exp2(tl.maximum(difference, 0).to(tl.float32) * log_decay) * scale
    triangle = tl.where(difference >= 0, triangle, 0.0)
    since = tl.exp2((inside + 1).to(tl.float32) * log_decay) * scale

    q_base = q_rotated + begin.to(tl.int64) * WIDTH + head * DIM
    k_base = k_rotated + begin.to(tl.int64) * WIDTH + head * DIM
    v_base = qkvz + begin.to(tl.int64) * qkvz_stride + 2 * WIDTH + head * DIM
    o_base = out + begin.to(tl.int64) * out_stride + head * DIM
    for at in range(0, length, CHUNK):
        row = (at + inside).to(tl.int64)
        valid = (at + inside < length)[:, None]
        q = tl.load(q_base + row[:, None] * WIDTH + channels[None, :], mask=valid, other=0.0)
        k = tl.load(k_base + row[:, None] * WIDTH + channels[None, :], mask=valid, other=0.0)
        v = tl.load(v_base + row[:, None] * qkvz_stride + values[None, :], mask=valid, other=0.0)
        q = _operand(q, INTERPRETED)
        v = _operand(v, INTERPRETED)

        scores = tl.dot(q, tl.trans(_operand(k, INTERPRETED)), out_dtype=tl.float32) * triangle
        read = tl.dot(q, _operand(carried, INTERPRETED), out_dtype=tl.float32) * since[:, None]
        read = tl.dot(_operand(scores, INTERPRETED), v, acc=read, out_dtype=tl.float32)
        tl.store(
            o_base + row[:, None] * out_stride + values[None, :],
            _bf16(read, INTERPRETED).to(tl.bfloat16),
            mask=valid,
        )

        count = tl.minimum(length - at, CHUNK)
        left = tl.exp2(tl.maximum(count - 1 - inside, 0).to(tl.float32) * log_decay)
        weighted = tl.trans(_operand(k.to(tl.float32) * left[:, None], INTERPRETED))
        carried = carried * tl.exp2(count.to(tl.float32) * log_decay)
        carried = tl.dot(weighted, v, acc=carried, out_dtype=tl.float32)
    tl.store(place, carried)


@triton.jit
def _gate_kernel(
    qkvz,
    o_norm,
    cu_seqlens,
    start,
    slots,
    out,
    qkvz_stride,
    out_stride,
    batch,
    eps,
    WIDTH: tl.constexpr,
    ROW: tl.constexpr,
    BATCH: tl.constexpr,
    ROWS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live, _ = _owner(rows, cu_seqlens, start, slots, batch, BATCH)
    channels = tl.arange(0, ROW)
    inside = live[:, None] & (channels < WIDTH)[None, :]
    target = out + (rows.to(tl.int64) * out_stride)[:, None] + channels[None, :]
    gate = qkvz + (rows.to(tl.int64) * qkvz_stride)[:, None] + 3 * WIDTH + channels[None, :]
    whole = tl.load(target, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(o_norm + channels, mask=channels < WIDTH, other=0.0).to(tl.float32)[None, :]
    inverse = (1.0 / tl.sqrt_rn(tl.sum(whole * whole, 1) / WIDTH + eps))[:, None]
    normed = _bf16(_bf16(whole * inverse, INTERPRETED) * weight, INTERPRETED)
    gated = normed * _bf16(1.0 / (1.0 + tl.exp(tl.minimum(-gate, 87.0))), INTERPRETED)
    tl.store(target, _bf16(gated, INTERPRETED).to(tl.bfloat16), mask=inside)


@functools.cache
def _tables(heads: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Frequencies of the rotation [dim/2], and the heads' decays as logarithms of base 2 [heads], float32."""
    power = (THETA ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)).float()
    below = 1 << (heads.bit_length() - 1)
    exponents = [(h + 1) / below for h in range(below)] + [(2 * h + 1) / (2 * below) for h in range(heads - below)]
    slopes = torch.tensor([2.0 ** (-8.0 * e) for e in exponents], dtype=torch.float64)
    return (1.0 / power).to(device), (-slopes / torch.log(slopes.new_tensor(2.0))).float().to(device)


def _heuristic(workload: Workload) -> dict[str, Any]:
    """Thin slices while the chains of chunks do not fill the GPU; one slice a head to interpret."""
    if not torch.cuda.is_available():
        return {"block_v": 128}
    thin = workload["batch"] <= 2
    spills = torch.cuda.get_device_capability()[0] > 9  # mma.sync keeps more in registers than wgmma
    return {"block_v": 32 if thin else 64, "num_warps": 8 if spills or not thin else 4}


@variant(
    requires=("triton",),
    arch=">=sm_80",
    runs_on=("cuda", "interpreter"),
    tunables={"block_v": (16, 32, 64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3)},
    heuristic=_heuristic,
)
def triton_chunk(
    qkvz: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    o_norm: Tensor,
    cu_seqlens: Tensor,
    start: Tensor,
    slots: Tensor,
    state: Tensor,
    out: Tensor,
    *,
    block_v: int = 32,
    num_warps: int = 4,
    num_stages: int = 2,
) -> None:
    """Launch the three kernels; the scratch is 4·heads·128 bytes a token."""
    tokens, width = out.shape
    if tokens == 0:
        return
    dim, batch = q_norm.numel(), slots.numel()
    heads = width // dim
    interpreted = not qkvz.is_cuda
    rows = 64 if interpreted else 1  # rows a program of the first and last kernel; a program is dear to interpret
    frequencies, log_decays = _tables(heads, dim, qkvz.device)
    rotated = torch.empty((2, tokens, width), dtype=torch.bfloat16, device=qkvz.device)
    padded = triton.next_power_of_2(batch)
    _rotate_kernel[(triton.cdiv(tokens, rows),)](
        qkvz,
        q_norm,
        k_norm,
        cu_seqlens,
        start,
        slots,
        frequencies,
        rotated,
        qkvz.stride(0),
        tokens,
        batch,
        EPS,
        HEADS=heads,
        HEADS_PADDED=triton.next_power_of_2(heads),
        DIM=dim,
        BATCH=padded,
        ROWS=rows,
        INTERPRETED=interpreted,
        num_warps=4,
    )
    _chunk_kernel[(dim // block_v, heads, batch)](
        rotated[0],
        rotated[1],
        qkvz,
        cu_seqlens,
        start,
        slots,
        log_decays,
        state,
        out,
        qkvz.stride(0),
        state.stride(0),
        state.stride(1),
        state.stride(2),
        out.stride(0),
        dim**-0.5,
        HEADS=heads,
        DIM=dim,
        CHUNK=CHUNK,
        BLOCK_V=block_v,
        INTERPRETED=interpreted,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    _gate_kernel[(triton.cdiv(tokens, rows),)](
        qkvz,
        o_norm,
        cu_seqlens,
        start,
        slots,
        out,
        qkvz.stride(0),
        out.stride(0),
        batch,
        EPS,
        WIDTH=width,
        ROW=triton.next_power_of_2(width),
        BATCH=padded,
        ROWS=rows,
        INTERPRETED=interpreted,
        num_warps=4,
    )
