"""One Triton kernel: a program takes whole rows, which are read once, stay in registers, and are written once.

Bound by memory: a row of 4096 channels moves 32 KiB. The weight is the same for all rows and comes from L2.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench.contract import Workload
from workbench.variant import variant

EPS = 1e-6


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
def _rows_kernel(
    branch,
    residual,
    weight,
    out,
    tokens,
    branch_stride,
    residual_stride,
    out_stride,
    scale,
    eps,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    channel = tl.arange(0, BLOCK)[None, :]
    inside = (row < tokens) & (channel < HIDDEN)
    added = tl.load(branch + row * branch_stride + channel, mask=inside, other=0.0).to(tl.float32)
    held = tl.load(residual + row * residual_stride + channel, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight + channel, mask=channel < HIDDEN, other=0.0).to(tl.float32)
    # The rounding between product and sum also keeps the compiler from fusing them into one.
    x = _bf16(held + _bf16(added * scale, INTERPRETED), INTERPRETED)
    tl.store(residual + row * residual_stride + channel, x.to(tl.bfloat16), mask=inside)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / HIDDEN + eps)
    normed = _bf16(_bf16(x * inverse[:, None], INTERPRETED) * gain, INTERPRETED)
    tl.store(out + row * out_stride + channel, normed.to(tl.bfloat16), mask=inside)


def _heuristic(workload: Workload) -> dict[str, Any]:
    """About sixteen channels a thread, short rows several to a program; interpreted, as few programs as may be."""
    block = triton.next_power_of_2(workload["hidden"])
    rows = min(triton.next_power_of_2(workload["tokens"]), max(1, 2048 // block))
    if not torch.cuda.is_available():
        return {"rows": min(triton.next_power_of_2(workload["tokens"]), max(1, (1 << 18) // block)), "num_warps": 4}
    return {"rows": rows, "num_warps": max(1, min(16, rows * block // 512))}


@variant(
    requires=("triton",),
    arch=">=sm_80",
    runs_on=("cuda", "interpreter"),
    tunables={"rows": (1, 2, 4, 8), "num_warps": (1, 2, 4, 8, 16, 32)},
    heuristic=_heuristic,
)
def triton_fused(
    branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float, *, rows: int = 1, num_warps: int = 8
) -> None:
    """Launch one program for every `rows` rows."""
    tokens, hidden = out.shape
    _rows_kernel[(triton.cdiv(tokens, rows),)](
        branch,
        residual,
        weight,
        out,
        tokens,
        branch.stride(0),
        residual.stride(0),
        out.stride(0),
        scale,
        EPS,
        HIDDEN=hidden,
        ROWS=rows,
        BLOCK=triton.next_power_of_2(hidden),
        INTERPRETED=not branch.is_cuda,
        num_warps=num_warps,
    )
