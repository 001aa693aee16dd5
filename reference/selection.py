"""Which blocks of 64 keys a query of a sparse layer attends to (InfLLM-V2, as released with the model).

Compressed keys are scored by each of a group's query heads, the scores are summed over the group, the
maximum over the windows that touch a block is the block's score, and the best blocks are chosen, the
first one and the local window always among them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import BLOCK, K1_STRIDE, K2_STRIDE
from .numerics import Precision, bf16, f32

_CHUNK = 1 << 26  # logits held at a time: bounds memory, never changes a bit
_WINDOWS = BLOCK // K1_STRIDE


def visible(positions: Tensor, stride: int, end_effect: int | None = None) -> Tensor:
    """How many compressed keys of `stride` a query at each position sees: those whose window has ended.

    `positions` is an integer tensor of 0-based positions. A window is two strides long at both levels, so
    the count is ⌊(p+1)/stride⌋ − 1, at least 0. `end_effect`: for a prompt of that many keys given in one
    piece, count as the released kernel does, which sees one fewer when the length is one short of a stride.
    """
    late = 0 if end_effect is None else int(end_effect % stride == stride - 1)
    return ((positions.long() + 1) // stride - 1 - late).clamp_min(0)


def scores(
    q: Tensor, k1: Tensor, k2: Tensor, positions: Tensor, precision: Precision, end_effect: int | None = None
) -> Tensor:
    """Scores of the compressed keys, [KV, t, n1]: bfloat16 (MODEL) or float64 (ORACLE).

    `q` [t, H, D] queries at `positions` [t], `k1` [n1, KV, D], `k2` [n2, KV, D]. The score of key j for a group
    is Σ over its heads of exp(q·k1_j/√D − LSE over visible k2 of q·k2/√D). The normaliser comes from the coarse
    level without a correction for their number: scores may exceed 1. Zero where j is not visible, and
    zero for a query that sees no k2.
    """
    tokens, heads, width = q.shape
    groups = k1.shape[1]
    out = torch.zeros((groups, tokens, k1.shape[0]), dtype=bf16(q[:0], precision).dtype, device=q.device)
    if k1.shape[0] == 0 or k2.shape[0] == 0:
        return out
    fine, coarse = k1.double().permute(1, 2, 0), k2.double().permute(1, 2, 0)
    step = max(1, _CHUNK // (heads * k1.shape[0]))
    for first in range(0, tokens, step):
        rows = slice(first, first + step)
        part = q[rows].double().reshape(-1, groups, heads // groups, width).permute(1, 2, 0, 3)
        total = _summed(part, fine, coarse, positions[rows], end_effect)
        out[:, rows] = bf16(f32(total, precision), precision)
    return out


def _summed(q: Tensor, fine: Tensor, coarse: Tensor, positions: Tensor, end_effect: int | None) -> Tensor:
    """Scores in float64, [KV, t, n1], of `q` [KV, G, t, D] against `fine` [KV, D, n1] and `coarse` [KV, D, n2]."""
    scale = q.shape[-1] ** -0.5
    seen1 = visible(positions, K1_STRIDE, end_effect)[:, None]
    seen2 = visible(positions, K2_STRIDE, end_effect)[:, None]
    columns1 = torch.arange(fine.shape[-1], device=q.device)
    columns2 = torch.arange(coarse.shape[-1], device=q.device)
    b = (q @ coarse[:, None]).mul_(scale).masked_fill_(columns2 >= seen2, -torch.inf)
    normaliser = torch.logsumexp(b, -1, keepdim=True)
    a = (q @ fine[:, None]).mul_(scale)
    weights = a.sub_(normaliser).exp_()
    return weights.sum(1).masked_fill_((columns1 >= seen1) | (seen2 == 0), 0.0)


def pool(scores: Tensor, positions: Tensor, blocks: int, init_blocks: int, local_blocks: int) -> Tensor:
    """Scores of blocks 0 … blocks−1, [KV, t, blocks] in the scores' dtype.

    Block b has the maximum of the scores 4b−1 … 4b+3, the windows that touch its keys; −inf where none of
    these exists. +inf marks the forced blocks: the first `init_blocks`, the query's own block and the
    `local_blocks` before it. A free score that overflowed counts as the largest finite number,
    so that it never displaces a forced block.
    """
    windows = scores.shape[-1]
    padded = torch.full(
        (*scores.shape[:-1], _WINDOWS * blocks + 1), -torch.inf, dtype=scores.dtype, device=scores.device
    )
    kept = min(windows, _WINDOWS * blocks)
    padded[..., 1 : 1 + kept] = scores[..., :kept]
    pooled = padded.unfold(-1, _WINDOWS + 1, _WINDOWS).amax(-1)
    pooled = pooled.clamp_max(torch.finfo(torch.bfloat16).max)
    block = torch.arange(blocks, device=scores.device)
    own = (positions.long() // BLOCK)[:, None]
    forced = (block < init_blocks) | ((block >= own - local_blocks) & (block <= own))
    return pooled.masked_fill(forced, torch.inf)


def settle(pooled: Tensor) -> Tensor:
    """Exact block scores, float64, rounded as the model rounds: what `pool` makes of scores of MODEL precision.

    Rounding keeps order, so the largest of rounded scores is the rounded largest.
    """
    return bf16(f32(pooled, Precision.MODEL), Precision.MODEL)


def choose(pooled: Tensor, positions: Tensor, count: int) -> Tensor:
    """The `count` highest blocks of each row of `pooled` [KV, t, blocks], int32 [KV, t, count].

    Ascending, with −1 in the unused tail: where there are fewer blocks, or a chosen one lies after the query's
    own. Of equal scores the lower block wins.
    """
    blocks = pooled.shape[-1]
    order = torch.sort(pooled, dim=-1, descending=True, stable=True).indices[..., :count]
    own = (positions.long() // BLOCK)[:, None]
    order = order.masked_fill(order > own, blocks).sort(-1).values
    chosen = torch.full((*pooled.shape[:-1], count), -1, dtype=torch.int32, device=pooled.device)
    chosen[..., : order.shape[-1]] = order.masked_fill(order == blocks, -1).to(torch.int32)
    return chosen


def block_scores(
    q: Tensor,
    k1: Tensor,
    k2: Tensor,
    positions: Tensor,
    blocks: int,
    *,
    init_blocks: int,
    local_blocks: int,
    precision: Precision,
    end_effect: int | None = None,
) -> Tensor:
    """`scores` and `pool` of all queries, some at a time so that long contexts fit; [KV, t, blocks]."""
    step = max(1, _CHUNK // max(1, q.shape[1] * k1.shape[0]))
    parts = []
    for first in range(0, q.shape[0], step):
        rows = slice(first, first + step)
        found = scores(q[rows], k1, k2, positions[rows], precision, end_effect)
        parts.append(pool(found, positions[rows], blocks, init_blocks, local_blocks))
    return torch.cat(parts, 1)


def select_blocks(
    q: Tensor,
    k1: Tensor,
    k2: Tensor,
    positions: Tensor,
    keys: int,
    *,
    topk_total: int,
    local_blocks: int,
    init_blocks: int,
    precision: Precision,
    end_effect: int | None = None,
) -> Tensor:
    """Blocks for queries `q` [t, H, D] of one sequence at `positions` [t], int32 [t, KV, topk_total].

    `keys` is how many keys the sequence has, `topk_total` how many blocks are chosen, the forced ones
    included (96 in the released model: 64 + 32). Ascending, −1 in the unused tail.
    """
    pooled = block_scores(
        q,
        k1,
        k2,
        positions,
        -(-keys // BLOCK),
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        precision=precision,
        end_effect=end_effect,
    )
    return choose(pooled, positions, topk_total).transpose(0, 1).contiguous()
