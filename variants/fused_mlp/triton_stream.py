"""fused_mlp for few tokens in two streams: gate and up together with SiLU behind them, then down."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from variants.linear.triton_stream import (
    GROUP,
    Stored,
    accumulate,
    inputs,
    padded,
    plan,
    product,
    refusal,
    rounded,
    scaled,
    stored,
)
from workbench.contract import Workload
from workbench.variant import variant


@triton.jit
def gate_up_kernel(
    x, codes, scale, total, inner, M, channels, K, x_row, w_row, s_row,
    FORMAT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program i: channels [i·BN, (i+1)·BN) between the projections, of all tokens, into `inner` [M, channels].

    A gate row and its up row, `channels` further on, are streamed together, so both sums end in the same registers.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    live = n < channels
    up_n = tl.where(live, n + channels, 2 * channels)  # past the end: not read
    gate_n = tl.where(live, n, 2 * channels)
    m = tl.arange(0, BM)
    gate = tl.zeros([BN, BM], dtype=tl.float32)
    up = tl.zeros([BN, BM], dtype=tl.float32)
    for c in range(0, tl.cdiv(K, BK)):
        low, high = inputs(x, m, c, M, K, x_row, FORMAT, BK, WIDE)
        gate = accumulate(gate, codes, scale, gate_n, 2 * channels, c, K, w_row, s_row, low, high, FORMAT, BN, BK, WIDE)
        up = accumulate(up, codes, scale, up_n, 2 * channels, c, K, w_row, s_row, low, high, FORMAT, BN, BK, WIDE)
    gate = rounded(scaled(gate, scale, total, gate_n, 2 * channels, FORMAT), WIDE).to(tl.float32)
    up = rounded(scaled(up, scale, total, up_n, 2 * channels, FORMAT), WIDE).to(tl.float32)
    # exp(−gate) may overflow to infinity, and gate/infinity is the right zero
    silu = rounded(gate / (1.0 + tl.exp(-gate)), WIDE).to(tl.float32)
    to = inner + m[None, :].to(tl.int64) * channels + n[:, None]
    tl.store(to, rounded(silu * up, WIDE), mask=live[:, None] & (m < M)[None, :])


def _prepare(workload: Workload, gate_up: Any, down: Any) -> dict[str, Any]:
    return {"gate_up": stored(gate_up), "down": stored(down)}


def _supports(workload: Workload) -> str | None:
    hidden, inner = workload["hidden"], workload["intermediate"]
    shapes = ((2 * inner, hidden), (hidden, inner))
    return refusal(workload["format"], workload["activations"], workload["tokens"], *shapes)


def _heuristic(workload: Workload) -> dict[str, Any]:
    second = plan(workload["hidden"], workload["intermediate"], workload["tokens"])
    return {"channels": 32, "block_k": second["block_k"], "split": second["split"], "num_stages": second["num_stages"]}


@variant(
    requires=("triton",),
    arch=">=sm_89",
    runs_on=("cuda", "interpreter"),
    tunables={
        "channels": (16, 32, 64),
        "block_n": (16, 32, 64, 128),
        "block_k": (64, 128, 256),
        "split": (1, 2, 4, 8, 16),
        "num_warps": (2, 4, 8),
        "num_stages": (2, 3, 4, 5),
    },
    supports=_supports,
    heuristic=_heuristic,
    prepare=_prepare,
)
def triton_stream(
    x: Tensor,
    gate_up: Stored,
    down: Stored,
    out: Tensor,
    *,
    channels: int = 32,
    block_n: int = 64,
    block_k: int = 128,
    split: int = 4,
    num_warps: int = 4,
    num_stages: int = 3,
) -> None:
    """Stream both weights once past up to 128 tokens, in every format with bf16 activations.

    The first kernel takes `channels` gate rows and their up rows a program and rounds as the model does (gate, up,
    SiLU and product to bfloat16). The second is `linear`'s: each output's sum is in `split` parts of fixed order.
    """
    tokens, hidden = x.shape
    width = gate_up.codes.shape[0] // 2
    inner = torch.empty(tokens, width, dtype=torch.bfloat16, device=x.device)
    step = block_k if gate_up.format in ("bf16", "fp8_row") else GROUP
    gate_up_kernel[(triton.cdiv(width, channels),)](
        x, gate_up.codes, gate_up.scale, gate_up.total, inner, tokens, width, hidden,
        x.stride(0), gate_up.codes.stride(0), gate_up.scale.stride(0),
        FORMAT=gate_up.format, BM=padded(tokens), BN=channels, BK=step, WIDE=not x.is_cuda,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    product(inner, down, out, block_n, block_k, split, num_warps=num_warps, num_stages=num_stages)
