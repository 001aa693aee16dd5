"""sampling without a sort: thresholds by bisection for the filters, then one pass of Gumbel noise.

A bfloat16 logit is one of 65536 numbers, so the lowest logit that top-k or top-p keeps is found in 16 halvings,
exactly, and one more pass finds the last id kept among its equals. What is left is a maximum over logit/T + noise.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench.contract import Workload
from workbench.variant import variant

THRESHOLD_BLOCK = 4096
"""Logits that the one program of a row takes at a time when it looks for thresholds."""


@triton.jit
def order_of(bits):
    """Integers in the order of bfloat16 numbers given by their bits (int16); −0 and +0 are equal."""
    wide = bits.to(tl.int32)
    wide = tl.where(wide == -32768, 0, wide)
    return tl.where(wide < 0, wide ^ 0x7FFF, wide)


@triton.jit
def value_of(bits):
    """Float32 value of bfloat16 bits (int16)."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def load(row, v, V):
    """Bits of tokens v of a row, −inf past its end."""
    return tl.load(row + v, mask=v < V, other=-128)  # 0xff80 is −inf


@triton.jit
def tally(row, V, low, above, top, temperature, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """Over tokens of order ≥ low, or > low if `above`: how many there are, or their sum of exp((logit − top)/T)."""
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        bits = load(row, v, V)
        inside = (order_of(bits) >= low + above) & (v < V)
        if WEIGHED:
            sums += tl.where(inside, tl.exp((value_of(bits) - top) / temperature), 0.0)
        else:
            sums += tl.where(inside, 1.0, 0.0)
    return tl.sum(sums, 0)


@triton.jit
def threshold_kernel(logits, temperature, top_k, top_p, lowest, last, V, row_stride, BLOCK: tl.constexpr):
    """Program b: what filters leave of row b, as the lowest order kept and the last id kept of that order."""
    b = tl.program_id(0)
    row = logits + b.to(tl.int64) * row_stride
    t = tl.load(temperature + b)
    k = tl.load(top_k + b)
    p = tl.load(top_p + b)
    bound = -40000  # below every order
    id_bound = V
    k = tl.where((k <= 0) | (k >= V), V, k)
    if (t > 0) & ((k < V) | (p < 1)):
        best = tl.full([BLOCK], -40000, dtype=tl.int32)
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK)
            best = tl.maximum(best, tl.where(v < V, order_of(load(row, v, V)), -40000))
        top_order = tl.max(best, 0)
        top = value_of(tl.where(top_order < 0, top_order ^ 0x7FFF, top_order))
        # top-k: the highest order that at least k tokens reach, and how many of its equals stay
        low, high = -32769, top_order + 1
        equal = V.to(tl.float32)
        if k < V:
            while high - low > 1:
                middle = (low + high) >> 1
                enough = tally(row, V, middle, 0, top, t, False, BLOCK) >= k
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle)
            bound = low
            equal = k - tally(row, V, low, 1, top, t, False, BLOCK)
        # top-p: the highest order whose tokens and those above reach p of what top-k left
        if p < 1:
            each = tl.exp((value_of(tl.where(low < 0, low ^ 0x7FFF, low)) - top) / t)
            above = tally(row, V, low, 1, top, t, True, BLOCK)
            total = above + tl.where(k < V, equal * each, 0.0)
            target = tl.maximum(p * total, 1e-30)
            high = top_order + 1
            while high - low > 1:
                middle = (low + high) >> 1
                enough = tally(row, V, middle, 0, top, t, True, BLOCK) >= target
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle)
            above = tally(row, V, low, 1, top, t, True, BLOCK)
            each = tl.exp((value_of(tl.where(low < 0, low ^ 0x7FFF, low)) - top) / t)
            there = tally(row, V, low, 0, top, t, False, BLOCK) - tally(row, V, low, 1, top, t, False, BLOCK)
            there = tl.where((low == bound) & (k < V), equal, there)
            equal = tl.minimum(tl.maximum(tl.ceil((target - above) / each), 1.0), there)
            bound = low
        # the id of the last of the equals that stay
        id_bound = -1
        seen = 0
        stay = equal.to(tl.int32)
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK)
            same = ((order_of(load(row, v, V)) == bound) & (v < V)).to(tl.int32)
            count = seen + tl.cumsum(same, 0)
            id_bound = tl.maximum(id_bound, tl.max(tl.where((same == 1) & (count <= stay), v, -1), 0))
            seen += tl.sum(same, 0)
    tl.store(lowest + b, bound)
    tl.store(last + b, id_bound)


@triton.jit
def gumbel(word):
    """−ln(−ln u) for u = (word + ½)·2^−32, in float32 to a few units in the last place.

    Near u = 1, where the largest noise comes from, −ln u is taken from 1 − u, which the word's complement gives
    exactly: by its series, or by a logarithm that is far enough from 0.
    """
    scale = 2.3283064365386963e-10
    rest = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * scale
    u = (word.to(tl.float32) + 0.5) * scale
    series = rest * (1 + rest * (1 / 2 + rest * (1 / 3 + rest * (1 / 4 + rest * (1 / 5 + rest * (1 / 6 + rest / 7))))))
    plain = -tl.log(tl.where(u < 0.5, u, 1 - rest))
    return -tl.log(tl.where(rest < 0.0625, series, plain))


@triton.jit
def score_kernel(
    logits, temperature, lowest, last, seed, step, scores, winners, V, row_stride, share,
    FILTERS: tl.constexpr, NOISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (s, b): the best token of row b among ids [s·share, (s+1)·share), and its score."""
    b = tl.program_id(1)
    row = logits + b.to(tl.int64) * row_stride
    t = tl.load(temperature + b)
    first = tl.program_id(0) * share
    end = tl.minimum(first + share, V)
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    winner = tl.full([BLOCK], 0x7FFFFFFF, dtype=tl.int32)
    if FILTERS:
        bound = tl.load(lowest + b)
        id_bound = tl.load(last + b)
    if NOISE:
        key = tl.load(seed + b)
        position = tl.load(step + b)
        step_low = (position & 0xFFFFFFFF).to(tl.uint32)
        step_high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for start in range(first, end, BLOCK):
        v = start + tl.arange(0, BLOCK)
        bits = load(row, v, V)
        value = value_of(bits)
        score = value
        if NOISE:  # noqa: SIM102 (the first is decided when compiling)
            if t > 0:  # greedy and padded rows draw nothing
                none = tl.zeros([BLOCK], dtype=tl.uint32)
                word, _, _, _ = tl.philox(key, v.to(tl.uint32), none + step_low, none + step_high, none)
                score = value / t + gumbel(word)
                if FILTERS:
                    order = order_of(bits)
                    kept = (order > bound) | ((order == bound) & (v <= id_bound))
                    score = tl.where(kept, score, float("-inf"))
        score = tl.where(v < end, score, float("-inf"))
        better = score > best
        best = tl.where(better, score, best)
        winner = tl.where(better, v, winner)
    top = tl.max(best, 0)
    at = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(scores + at, top)
    tl.store(winners + at, tl.min(tl.where(best == top, winner, 0x7FFFFFFF), 0))


@triton.jit
def choose_kernel(scores, winners, temperature, tokens, SHARES: tl.constexpr, BLOCK: tl.constexpr):
    """Program b: the best of row b's shares, the lowest id among equals; padded rows are left alone."""
    b = tl.program_id(0)
    s = tl.arange(0, BLOCK)
    score = tl.load(scores + b * SHARES + s, mask=s < SHARES, other=float("-inf"))
    winner = tl.load(winners + b * SHARES + s, mask=s < SHARES, other=0x7FFFFFFF)
    token = tl.min(tl.where(score == tl.max(score, 0), winner, 0x7FFFFFFF), 0)
    tl.store(tokens + b, token, mask=tl.load(temperature + b) >= 0)


def _filters(workload: Workload) -> bool:
    return workload["mode"] not in ("greedy", "temperature")


def _supports(workload: Workload) -> str | None:
    pieces = workload["batch"] * triton.cdiv(workload["vocab"], THRESHOLD_BLOCK)
    if not torch.cuda.is_available() and _filters(workload) and pieces > 8:
        return f"interpreted, 35 passes over {pieces} pieces of {THRESHOLD_BLOCK} logits take minutes; needs a GPU"
    return None


def _heuristic(workload: Workload) -> dict[str, Any]:
    """Leave out what no row of the workload asks for, and share a row among enough programs to fill a GPU."""
    shares = min(32, 264 // workload["batch"]) if torch.cuda.is_available() else 2
    return {
        "filters": _filters(workload),
        "noise": workload["mode"] != "greedy",
        "shares": max(s for s in (1, 2, 4, 8, 16, 32) if s <= shares),
    }


@variant(
    requires=("triton",),
    runs_on=("cuda", "interpreter"),
    tunables={
        "filters": (True, False),
        "noise": (True, False),
        "shares": (1, 2, 4, 8, 16, 32),
        "block": (512, 1024, 2048, 4096),
        "num_warps": (4, 8, 16),
    },
    supports=_supports,
    heuristic=_heuristic,
)
def triton_gumbel(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    step: Tensor,
    tokens: Tensor,
    *,
    filters: bool = True,
    noise: bool = True,
    shares: int = 8,
    block: int = 1024,
    num_warps: int = 4,
) -> None:
    """Every kind of row, any vocabulary. Three kernels: thresholds (only with filters), scores, choice.

    A row's scores are shared among `shares` programs; its thresholds are found by one, in up to 35 passes that stay
    in the L2 cache. `filters=False` skips those (right only if no row has top-k or top-p), `noise=False` the
    random numbers (only if every row is greedy). Float32; top-p's sums are added in a fixed order.
    """
    batch, vocabulary = logits.shape
    bits, device = logits.view(torch.int16), logits.device
    lowest = torch.empty(batch, dtype=torch.int32, device=device)
    last = torch.empty_like(lowest)
    scores = torch.empty(batch, shares, dtype=torch.float32, device=device)
    winners = torch.empty(batch, shares, dtype=torch.int32, device=device)
    if filters:
        threshold_kernel[(batch,)](
            bits,
            temperature,
            top_k,
            top_p,
            lowest,
            last,
            vocabulary,
            bits.stride(0),
            BLOCK=THRESHOLD_BLOCK,
            num_warps=16,
        )
    share = triton.cdiv(triton.cdiv(vocabulary, shares), block) * block
    score_kernel[(shares, batch)](
        bits, temperature, lowest, last, seed, step, scores, winners, vocabulary, bits.stride(0), share,
        FILTERS=filters, NOISE=noise, BLOCK=block, num_warps=num_warps,
    )  # fmt: skip
    choose_kernel[(batch,)](
        scores, winners, temperature, tokens, SHARES=shares, BLOCK=triton.next_power_of_2(shares), num_warps=1
    )
