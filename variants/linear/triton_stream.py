"""linear for few tokens: the weight streams past the inputs once, in its own format.

With up to 128 tokens the time is that of reading the weight, so low-bit codes are turned into numbers in registers
and never written back. Weight rows are the first operand of the tensor cores, so that few tokens fill a tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench.contract import Workload
from workbench.variant import variant

MOST_TOKENS = 128
MOST_INTERPRETED = 1 << 17
"""Weights of a workload that Triton's interpreter passes in about a second."""
GROUP = 128
"""Inputs of a step in grouped formats: one scale of w8a16, w4a16 and fp8_block, eight of nvfp4."""
_FREE = ("bf16", "fp8_row")
"""Formats without groups along K, whose step may be any power of two."""


class Stored(NamedTuple):
    """A weight as the kernels read it.

    `codes` [N, row]: bfloat16, e4m3fn, or bytes (w8a16: one an input; w4a16, nvfp4: within each 128 inputs, byte j
    holds input j in its low and input 64 + j in its high half, so that both halves meet contiguous inputs). `scale` is
    the format's, `total` nvfp4's global scale; where a format has none, another tensor stands in.
    """

    format: str
    codes: Tensor
    scale: Tensor
    total: Tensor


def stored(weight: Any) -> Stored:
    """Rearrange a contract's weight for the kernels (only 4-bit codes are moved)."""
    tensors = weight.tensors
    if weight.format == "bf16":
        return Stored("bf16", *[tensors["weight"]] * 3)
    scale = tensors["scale"]
    if weight.format in ("fp8_row", "fp8_block"):
        return Stored(weight.format, tensors["weight"], scale, scale)
    codes = tensors["packed"].view(torch.uint8)
    if weight.format == "w8a16":
        return Stored("w8a16", codes, scale, scale)
    plain = torch.stack((codes & 15, codes >> 4), -1).flatten(1).unflatten(1, (-1, 2, GROUP // 2))
    codes = (plain[:, :, 0] | (plain[:, :, 1] << 4)).flatten(1)
    return Stored(weight.format, codes, scale, tensors.get("global_scale", scale))


def refusal(format: str, activations: str, tokens: int, *shapes: tuple[int, int]) -> str | None:
    """Why the kernels cannot serve a workload whose weights have these shapes [N, K]; None if they can."""
    if tokens > MOST_TOKENS:
        return f"streams the weight past at most {MOST_TOKENS} tokens, got {tokens}"
    if activations != "bf16":
        return "multiplies in bf16 and quantises no activations"
    odd = [k for _, k in shapes if k % GROUP]
    if format not in _FREE and odd:
        return f"takes {GROUP} inputs a step in {format}, got K={odd[0]}"
    weights = sum(n * k for n, k in shapes)
    if not torch.cuda.is_available() and weights > MOST_INTERPRETED:
        return f"interpreted, more than {MOST_INTERPRETED} weights take minutes, got {weights}; needs a GPU"
    return None


@triton.jit
def operand(x, WIDE: tl.constexpr):
    """Operand of the tensor cores: bfloat16; float32 in the interpreter, whose bfloat16 products are wrong."""
    return x.to(tl.float32) if WIDE else x.to(tl.bfloat16)


@triton.jit
def rounded(x, WIDE: tl.constexpr):
    """Round float32 to bfloat16, half to even; the interpreter's own cast drops the low bits instead."""
    if WIDE:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def inputs(x, m, c, M, K, x_row, FORMAT: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr):
    """Step c of the inputs, transposed: [BK, BM] twice, or its two halves [BK/2, BM] for 4-bit formats."""
    if FORMAT == "w4a16" or FORMAT == "nvfp4":
        k = c * BK + tl.arange(0, BK // 2)
        at = x + m[None, :].to(tl.int64) * x_row + k[:, None]
        low = tl.load(at, mask=(m < M)[None, :], other=0.0)
        high = tl.load(at + BK // 2, mask=(m < M)[None, :], other=0.0)
        return operand(low, WIDE), operand(high, WIDE)
    else:
        k = c * BK + tl.arange(0, BK)
        at = x + m[None, :].to(tl.int64) * x_row + k[:, None]
        whole = operand(tl.load(at, mask=(m < M)[None, :] & (k < K)[:, None], other=0.0), WIDE)
        return whole, whole


@triton.jit
def e2m1(code):
    """Float32 values of 4-bit float codes (int32): the exponent's bits are put where float32 has them."""
    size = code & 7
    normal = ((((size >> 1) + 126) << 23) | ((size & 1) << 22)).to(tl.float32, bitcast=True)
    value = tl.where(size < 2, size.to(tl.float32) * 0.5, normal)
    return tl.where(code > 7, -value, value)


@triton.jit
def sixteens(scale, row, live, at, s_row, BN: tl.constexpr):
    """Scales of 64 inputs, each for 16, spread to [BN, 64]."""
    g = at + tl.arange(0, 4)
    four = tl.load(scale + row[:, None] * s_row + g[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    return tl.reshape(tl.broadcast_to(four[:, :, None], [BN, 4, 16]), [BN, 64])


@triton.jit
def accumulate(
    acc, codes, scale, n, N, c, K, w_row, s_row, low, high,
    FORMAT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add to acc float32 [BN, BM] the product of step c of weight rows n with the inputs from `inputs`.

    Integer and fp8 codes are exact in bfloat16 and a group's scale is applied to its float32 sum, so no weight is
    rounded. An e2m1 value times its e4m3 scale has at most six significant bits: exact in bfloat16 as well.
    """
    live = n < N
    row = n.to(tl.int64)
    if FORMAT == "w4a16" or FORMAT == "nvfp4":
        j = c * (BK // 2) + tl.arange(0, BK // 2)
        packed = tl.load(codes + row[:, None] * w_row + j[None, :], mask=live[:, None], other=0).to(tl.int32)
        first, second = packed & 15, packed >> 4
        if FORMAT == "w4a16":
            part = tl.dot(operand(first.to(tl.float32) - 8, WIDE), low)
            part = tl.dot(operand(second.to(tl.float32) - 8, WIDE), high, part)
            s = tl.load(scale + row * s_row + c, mask=live, other=0.0).to(tl.float32)
            acc += part * s[:, None]
        else:
            a = e2m1(first) * sixteens(scale, row, live, c * 8, s_row, BN)
            b = e2m1(second) * sixteens(scale, row, live, c * 8 + 4, s_row, BN)
            acc = tl.dot(operand(a, WIDE), low, acc)
            acc = tl.dot(operand(b, WIDE), high, acc)
    else:
        k = c * BK + tl.arange(0, BK)
        at = codes + row[:, None] * w_row + k[None, :]
        tile = tl.load(at, mask=live[:, None] & (k < K)[None, :], other=0.0)
        if FORMAT == "w8a16":
            part = tl.dot(operand(tile.to(tl.float32) - 128, WIDE), low)
            s = tl.load(scale + row * s_row + c, mask=live, other=0.0).to(tl.float32)
            acc += part * s[:, None]
        elif FORMAT == "fp8_block":
            part = tl.dot(operand(tile.to(tl.float32), WIDE), low)
            s = tl.load(scale + (row // 128) * s_row + c, mask=live, other=0.0)
            acc += part * s[:, None]
        else:
            acc = tl.dot(operand(tile.to(tl.float32), WIDE), low, acc)
    return acc


@triton.jit
def scaled(acc, scale, total, n, N, FORMAT: tl.constexpr):
    """Apply to the finished sums what does not depend on the input: a row's scale, nvfp4's global scale."""
    if FORMAT == "fp8_row":
        acc *= tl.load(scale + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    elif FORMAT == "nvfp4":
        acc *= tl.load(total)
    return acc


@triton.jit
def stream_kernel(
    x, codes, scale, total, out, M, N, K, x_row, w_row, s_row, out_row, split_stride, steps,
    FORMAT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program (i, s): outputs [i·BN, (i+1)·BN) of all tokens over steps [s·steps, (s+1)·steps) of the inputs.

    `out` is the result itself if there is one part, else float32 parts `split_stride` apart.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    first = tl.program_id(1) * steps
    last = tl.minimum(first + steps, tl.cdiv(K, BK))
    acc = tl.zeros([BN, BM], dtype=tl.float32)
    for c in range(first, last):
        low, high = inputs(x, m, c, M, K, x_row, FORMAT, BK, WIDE)
        acc = accumulate(acc, codes, scale, n, N, c, K, w_row, s_row, low, high, FORMAT, BN, BK, WIDE)
    acc = scaled(acc, scale, total, n, N, FORMAT)
    to = out + tl.program_id(1).to(tl.int64) * split_stride + m[None, :].to(tl.int64) * out_row + n[:, None]
    mask = (n < N)[:, None] & (m < M)[None, :]
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(to, rounded(acc, WIDE), mask=mask)
    else:
        tl.store(to, acc, mask=mask)


@triton.jit
def reduce_kernel(parts, out, M, N, out_row, SPLIT: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Add `SPLIT` float32 parts [SPLIT, M, N] in their order and round once; program (i, m): a block of token m."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.program_id(1).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for s in tl.static_range(SPLIT):
        total += tl.load(parts + (s * M + m) * N + n, mask=n < N, other=0.0)
    tl.store(out + m * out_row + n, rounded(total, WIDE), mask=n < N)


def product(x: Tensor, w: Stored, out: Tensor, block_n: int, block_k: int, split: int, **launch: int) -> None:
    """`out` [M, N] ← `x` [M, K] times the weight, in one kernel, or two if the sum is split into parts."""
    tokens, inner = x.shape
    outputs = w.codes.shape[0]
    step = block_k if w.format in _FREE else GROUP
    steps = triton.cdiv(triton.cdiv(inner, step), split)
    split = triton.cdiv(triton.cdiv(inner, step), steps)
    parts = out
    if split > 1:
        parts = torch.empty(split, tokens, outputs, dtype=torch.float32, device=x.device)
    apart = tokens * outputs if split > 1 else 0
    stream_kernel[(triton.cdiv(outputs, block_n), split)](
        x, w.codes, w.scale, w.total, parts, tokens, outputs, inner,
        x.stride(0), w.codes.stride(0), w.scale.stride(0), parts.stride(-2), apart, steps,
        FORMAT=w.format, BM=padded(tokens), BN=block_n, BK=step, WIDE=not x.is_cuda, **launch,
    )  # fmt: skip
    if split > 1:
        grid = (triton.cdiv(outputs, 512), tokens)
        reduce_kernel[grid](parts, out, tokens, outputs, out.stride(0), SPLIT=split, BLOCK=512, WIDE=not x.is_cuda)


def padded(tokens: int) -> int:
    """Columns of a tile: a power of two that tensor cores take."""
    return max(16, triton.next_power_of_2(tokens))


def plan(outputs: int, inner: int, tokens: int, block_n: int = 64) -> dict[str, int]:
    """Split the sum until some 256 programs run, two for each multiprocessor of an H200.

    A tile of the inputs grows with the tokens, so the step shrinks, to stay within the 99 KiB of sm_120.
    """
    split, most = 1, 16 if torch.cuda.is_available() else 2
    while split < most and triton.cdiv(outputs, block_n) * split < 256 and inner // (split * 2) >= 2 * GROUP:
        split *= 2
    block_k = 128 if tokens <= 32 else 64
    return {"block_n": block_n, "block_k": block_k, "split": split, "num_stages": 3 if tokens <= 64 else 2}


def _prepare(workload: Workload, weight: Any) -> dict[str, Any]:
    return {"weight": stored(weight)}


def _supports(workload: Workload) -> str | None:
    return refusal(workload["format"], workload["activations"], workload["tokens"], (workload["n"], workload["k"]))


def _heuristic(workload: Workload) -> dict[str, Any]:
    return plan(workload["n"], workload["k"], workload["tokens"])


@variant(
    requires=("triton",),
    arch=">=sm_89",
    runs_on=("cuda", "interpreter"),
    tunables={
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
    weight: Stored,
    out: Tensor,
    *,
    block_n: int = 64,
    block_k: int = 128,
    split: int = 1,
    num_warps: int = 4,
    num_stages: int = 3,
) -> None:
    """Stream the weight once past up to 128 tokens (bf16, fp8_row, fp8_block, w8a16, w4a16, nvfp4).

    A program takes `block_n` outputs and a share of the inputs; `split` shares are summed in a fixed order by a
    second kernel. Grouped formats take 128 inputs a step, the others `block_k`. Activations stay bfloat16.
    """
    product(x, weight, out, block_n, block_k, split, num_warps=num_warps, num_stages=num_stages)
