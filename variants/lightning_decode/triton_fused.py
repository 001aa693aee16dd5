"""One Triton kernel for the whole op: value slices in parallel, the last one of a sequence norms and gates.

A program takes one head of one sequence and `block_v` of its 128 values. It repeats the head norms and the
rotation of q and k (512 bytes), updates its slice of the state and stores its slice of o, rounded to bfloat16, in
`out`. Then it takes a ticket; the program with the sequence's last ticket reads the row back, norms it over all
heads, gates it and returns the counter to zero. Sums run in a fixed order whoever is last, so the bits repeat.
The counters are shared by all calls on a device: two launches must not overlap in time.
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
COUNTERS = 4096


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
def _head(row, weight, cos, sin, eps, half, DIM: tl.constexpr, INTERPRETED: tl.constexpr):
    # Norm and rotation of one head, as its two halves, which are the pairs of the rotation.
    first = tl.load(row + half).to(tl.float32)
    second = tl.load(row + DIM // 2 + half).to(tl.float32)
    mean_square = (tl.sum(first * first, 0) + tl.sum(second * second, 0)) / DIM
    inverse = 1.0 / tl.sqrt_rn(mean_square + eps)
    first = _bf16(_bf16(first * inverse, INTERPRETED) * tl.load(weight + half).to(tl.float32), INTERPRETED)
    second = _bf16(_bf16(second * inverse, INTERPRETED) * tl.load(weight + DIM // 2 + half).to(tl.float32), INTERPRETED)
    return _bf16(first * cos - second * sin, INTERPRETED), _bf16(second * cos + first * sin, INTERPRETED)


@triton.jit
def _decode_kernel(
    qkvz,
    q_norm,
    k_norm,
    o_norm,
    positions,
    slots,
    state,
    out,
    frequencies,
    decays,
    counters,
    qkvz_stride,
    state_slot_stride,
    state_head_stride,
    state_key_stride,
    out_stride,
    scale,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROW: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    SLICES: tl.constexpr = DIM // BLOCK_V
    WIDTH: tl.constexpr = HEADS * DIM
    program = tl.program_id(0)
    sequence = program // (HEADS * SLICES)
    head = program // SLICES % HEADS
    slot = tl.load(slots + sequence).to(tl.int64)
    if slot < 0:
        return

    half = tl.arange(0, DIM // 2)
    values = program % SLICES * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = half[:, None] * state_key_stride + values[None, :]
    upper = state + slot * state_slot_stride + head.to(tl.int64) * state_head_stride + tile
    lower = upper + DIM // 2 * state_key_stride
    state_upper = tl.load(upper, eviction_policy="evict_first")
    state_lower = tl.load(lower, eviction_policy="evict_first")

    row = qkvz + sequence.to(tl.int64) * qkvz_stride
    angle = tl.load(positions + sequence).to(tl.float32) * tl.load(frequencies + half)
    cos = tl.cos(angle)
    sin = tl.sin(angle)
    q_upper, q_lower = _head(row + head * DIM, q_norm, cos, sin, eps, half, DIM, INTERPRETED)
    k_upper, k_lower = _head(row + WIDTH + head * DIM, k_norm, cos, sin, eps, half, DIM, INTERPRETED)
    value = tl.load(row + 2 * WIDTH + head * DIM + values).to(tl.float32)

    decay = tl.load(decays + head)
    state_upper = state_upper * decay + k_upper[:, None] * value[None, :]
    state_lower = state_lower * decay + k_lower[:, None] * value[None, :]
    tl.store(upper, state_upper, eviction_policy="evict_first")
    tl.store(lower, state_lower, eviction_policy="evict_first")
    read = tl.sum(state_upper * (q_upper * scale)[:, None] + state_lower * (q_lower * scale)[:, None], 0)

    target = out + sequence.to(tl.int64) * out_stride
    tl.store(target + head * DIM + values, _bf16(read, INTERPRETED).to(tl.bfloat16))
    tl.debug_barrier()  # every thread's part of o is stored before this program's ticket is drawn
    ticket = tl.atomic_add(counters + sequence, 1, sem="acq_rel")
    if ticket == HEADS * SLICES - 1:
        channels = tl.arange(0, ROW)
        inside = channels < WIDTH
        whole = tl.load(target + channels, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        gate = tl.load(row + 3 * WIDTH + channels, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(o_norm + channels, mask=inside, other=0.0).to(tl.float32)
        inverse = 1.0 / tl.sqrt_rn(tl.sum(whole * whole, 0) / WIDTH + eps)
        normed = _bf16(_bf16(whole * inverse, INTERPRETED) * weight, INTERPRETED)
        gated = normed * _bf16(1.0 / (1.0 + tl.exp(tl.minimum(-gate, 87.0))), INTERPRETED)
        tl.store(target + channels, _bf16(gated, INTERPRETED).to(tl.bfloat16), mask=inside)
        tl.store(counters + sequence, 0)


@functools.cache
def _tables(heads: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Frequencies of the rotation [dim/2] and decays of the heads [heads], float32 on the device."""
    power = (THETA ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)).float()
    below = 1 << (heads.bit_length() - 1)
    exponents = [(h + 1) / below for h in range(below)] + [(2 * h + 1) / (2 * below) for h in range(heads - below)]
    slopes = torch.tensor([2.0 ** (-8.0 * e) for e in exponents], dtype=torch.float64)
    return (1.0 / power).to(device), torch.exp(-slopes).float().to(device)


@functools.cache
def _counters(device: torch.device) -> Tensor:
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def _heuristic(workload: Workload) -> dict[str, Any]:
    """Thin slices while the programs do not fill the GPU, wide ones once they do, and few programs to interpret."""
    if not torch.cuda.is_available():
        return {"block_v": 128, "num_warps": 4}
    return {"block_v": 32, "num_warps": 4} if workload["batch"] <= 4 else {"block_v": 64, "num_warps": 4}


def _supports(workload: Workload) -> str | None:
    return None if workload["batch"] <= COUNTERS else f"has counters for {COUNTERS} sequences"


@variant(
    requires=("triton",),
    arch=">=sm_80",
    runs_on=("cuda", "interpreter"),
    tunables={"block_v": (16, 32, 64, 128), "num_warps": (2, 4, 8)},
    supports=_supports,
    heuristic=_heuristic,
)
def triton_fused(
    qkvz: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    o_norm: Tensor,
    positions: Tensor,
    slots: Tensor,
    state: Tensor,
    out: Tensor,
    *,
    block_v: int = 32,
    num_warps: int = 4,
) -> None:
    """Launch one program for every sequence, head and slice of `block_v` values."""
    batch, width = out.shape
    dim = q_norm.numel()
    heads = width // dim
    frequencies, decays = _tables(heads, dim, qkvz.device)
    _decode_kernel[(batch * heads * (dim // block_v),)](
        qkvz,
        q_norm,
        k_norm,
        o_norm,
        positions,
        slots,
        state,
        out,
        frequencies,
        decays,
        _counters(qkvz.device),
        qkvz.stride(0),
        state.stride(0),
        state.stride(1),
        state.stride(2),
        out.stride(0),
        dim**-0.5,
        EPS,
        HEADS=heads,
        DIM=dim,
        BLOCK_V=block_v,
        ROW=triton.next_power_of_2(width),
        INTERPRETED=not qkvz.is_cuda,
        num_warps=num_warps,
    )
