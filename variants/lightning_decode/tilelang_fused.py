"""Two TileLang kernels in one launch call: value slices of the recurrence, then norm and gate a sequence.

A block of the first kernel takes one head of one sequence and `block_v` of its 128 values: it norms and rotates q
and k, updates its slice of the state and stores o, rounded to bfloat16, in `out`. A block of the second norms the
row over all heads and gates it, in place. Sizes and strides are symbols, so a head count is compiled once.
"""

# No `from __future__ import annotations` here: TileLang evaluates the annotations of a kernel where it is defined.
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workbench.contract import Workload
from workbench.variant import variant

EPS = 1e-6
THETA = 10000.0


@functools.cache
def _tables(heads: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Frequencies of the rotation [dim/2] and decays of the heads [heads], float32 on the device."""
    power = (THETA ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)).float()
    below = 1 << (heads.bit_length() - 1)
    exponents = [(h + 1) / below for h in range(below)] + [(2 * h + 1) / (2 * below) for h in range(heads - below)]
    slopes = torch.tensor([2.0 ** (-8.0 * e) for e in exponents], dtype=torch.float64)
    return (1.0 / power).to(device), torch.exp(-slopes).float().to(device)


def program(heads: int, dim: int, block_v: int, threads: int) -> Any:
    """The TileLang function for a number of heads; batch, slots and all strides are found at the call."""
    import tilelang.language as T

    width, half, scale = heads * dim, dim // 2, dim**-0.5
    batch, pool = T.dynamic("batch"), T.dynamic("pool")
    qkvz_stride, out_stride = T.dynamic("qkvz_stride"), T.dynamic("out_stride")
    slot_stride, head_stride, key_stride = T.dynamic("slot_stride"), T.dynamic("head_stride"), T.dynamic("key_stride")
    bf16, f32, i32 = "bfloat16", "float32", "int32"

    @T.prim_func
    def main(
        qkvz: T.StridedTensor((batch, 4 * width), (qkvz_stride, 1), bf16),
        q_norm: T.Tensor((dim,), bf16),
        k_norm: T.Tensor((dim,), bf16),
        o_norm: T.Tensor((width,), bf16),
        positions: T.Tensor((batch,), i32),
        slots: T.Tensor((batch,), i32),
        state: T.StridedTensor((pool, heads, dim, dim), (slot_stride, head_stride, key_stride, 1), f32),
        out: T.StridedTensor((batch, width), (out_stride, 1), bf16),
        frequencies: T.Tensor((half,), f32),
        decays: T.Tensor((heads,), f32),
    ):
        with T.Kernel(dim // block_v, heads, batch, threads=threads) as (piece, head, row):
            tile = T.alloc_fragment((dim, block_v), f32)
            product = T.alloc_fragment((dim, block_v), f32)
            read = T.alloc_fragment((block_v,), f32)
            pair = T.alloc_fragment((2, dim), f32)
            square = T.alloc_fragment((2, dim), f32)
            total = T.alloc_fragment((2,), f32)
            normed = T.alloc_shared((2, dim), f32)
            turned = T.alloc_shared((2, dim), f32)
            slot = slots[row]
            if slot >= 0:
                T.copy(state[slot, head, 0:dim, piece * block_v : (piece + 1) * block_v], tile)
                for p, i in T.Parallel(2, dim):
                    pair[p, i] = T.cast(qkvz[row, p * width + head * dim + i], f32)
                    square[p, i] = pair[p, i] * pair[p, i]
                T.reduce_sum(square, total, dim=1)
                for p, i in T.Parallel(2, dim):
                    unit = T.cast(T.cast(pair[p, i] * (1.0 / T.sqrt(total[p] / dim + EPS)), bf16), f32)
                    weight = T.if_then_else(p == 0, T.cast(q_norm[i], f32), T.cast(k_norm[i], f32))
                    normed[p, i] = T.cast(T.cast(unit * weight, bf16), f32)
                T.sync_threads()
                for p, i in T.Parallel(2, half):
                    angle = T.cast(positions[row], f32) * frequencies[i]
                    cos = T.cos(angle)
                    sin = T.sin(angle)
                    turned[p, i] = T.cast(T.cast(normed[p, i] * cos - normed[p, i + half] * sin, bf16), f32)
                    turned[p, i + half] = T.cast(T.cast(normed[p, i + half] * cos + normed[p, i] * sin, bf16), f32)
                T.sync_threads()
                for i, j in T.Parallel(dim, block_v):
                    value = T.cast(qkvz[row, 2 * width + head * dim + piece * block_v + j], f32)
                    tile[i, j] = tile[i, j] * decays[head] + turned[1, i] * value
                    product[i, j] = tile[i, j] * (turned[0, i] * scale)
                T.reduce_sum(product, read, dim=0)
                T.copy(tile, state[slot, head, 0:dim, piece * block_v : (piece + 1) * block_v])
                for j in T.Parallel(block_v):
                    out[row, head * dim + piece * block_v + j] = T.cast(read[j], bf16)
        with T.Kernel(batch, threads=256 if heads % 2 == 0 else 128) as row:
            whole = T.alloc_fragment((width,), f32)
            square = T.alloc_fragment((width,), f32)
            total = T.alloc_fragment((1,), f32)
            if slots[row] >= 0:
                for i in T.Parallel(width):
                    whole[i] = T.cast(out[row, i], f32)
                    square[i] = whole[i] * whole[i]
                T.reduce_sum(square, total, dim=0)
                for i in T.Parallel(width):
                    unit = T.cast(T.cast(whole[i] * (1.0 / T.sqrt(total[0] / width + EPS)), bf16), f32)
                    weighted = T.cast(T.cast(unit * T.cast(o_norm[i], f32), bf16), f32)
                    gate = T.cast(T.cast(1.0 / (1.0 + T.exp(-T.cast(qkvz[row, 3 * width + i], f32))), bf16), f32)
                    out[row, i] = T.cast(weighted * gate, bf16)

    return main


@functools.cache
def _kernel(heads: int, dim: int, block_v: int, threads: int) -> Callable[..., None]:
    import tilelang

    return tilelang.compile(program(heads, dim, block_v, threads))


def _heuristic(workload: Workload) -> dict[str, Any]:
    """Thin slices while the blocks do not fill the GPU."""
    return {"block_v": 32, "threads": 128} if workload["batch"] <= 4 else {"block_v": 64, "threads": 128}


@variant(
    requires=("tilelang",),
    arch=">=sm_80",
    runs_on=("cuda",),
    tunables={"block_v": (16, 32, 64, 128), "threads": (128, 256)},
    heuristic=_heuristic,
)
def tilelang_fused(
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
    threads: int = 128,
) -> None:
    """Launch both kernels on the caller's stream."""
    dim = q_norm.numel()
    heads = o_norm.numel() // dim
    kernel = _kernel(heads, dim, block_v, threads)
    kernel(qkvz, q_norm, k_norm, o_norm, positions, slots, state, out, *_tables(heads, dim, qkvz.device))
