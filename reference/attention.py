"""Softmax attention of the sparse layers: over chosen blocks, over everything, and the output gate.

Queries have H heads and keys KV heads; query head h reads key-value head h // (H / KV). Nothing has a position
encoding. Logits, softmax and the weighted mean are float64 and rounded once, to bfloat16: the bits do not
depend on how many queries are computed together. Work is cut into pieces of bounded memory.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .config import BLOCK
from .numerics import Precision, bf16, mul_bf16, sigmoid_bf16

_KEY_PIECE = 1 << 16
"""Keys of one step of the running softmax of the dense path; fixed, so that every device sums alike."""


def _budget(device: torch.device) -> int:
    """Elements a float64 intermediate may have: 1 GiB on a GPU, elsewhere 8 MiB, which the allocator reuses."""
    return 1 << (27 if device.type == "cuda" else 20)


def _heads_of(kv_head: int, heads: int, kv_heads: int) -> slice:
    """The query heads that read key-value head `kv_head`."""
    group = heads // kv_heads
    return slice(kv_head * group, (kv_head + 1) * group)


def _logits(q: Tensor, keys: Tensor, allowed: Tensor) -> Tensor:
    """q·k/√D in float64, −inf where not `allowed`: q [t, G, D], keys [t or 1, m, D], allowed [t, m] → [t, G, m]."""
    logits = (q.double() @ keys.double().mT) * q.shape[-1] ** -0.5
    return logits.masked_fill(~allowed[:, None, :], -math.inf)


class _RunningSoftmax:
    """Softmax-weighted mean of values that arrive in pieces (Milakov & Gimelshein 2018), float64."""

    def __init__(self, rows: tuple[int, int], dim: int, device: torch.device) -> None:
        self.top = torch.full((*rows, 1), -math.inf, dtype=torch.float64, device=device)
        self.total = torch.zeros((*rows, 1), dtype=torch.float64, device=device)
        self.mean = torch.zeros((*rows, dim), dtype=torch.float64, device=device)

    def add(self, logits: Tensor, values: Tensor) -> None:
        """Take in logits [t, G, m] and their values [t or 1, m, D]."""
        if logits.shape[-1] == 0:
            return
        top = torch.maximum(self.top, logits.amax(-1, keepdim=True))
        shift = top.masked_fill(top == -math.inf, 0.0)
        weights = torch.exp(logits - shift)
        fade = torch.exp(self.top - shift)
        self.total = self.total * fade + weights.sum(-1, keepdim=True)
        self.mean = self.mean * fade + weights @ values.double()
        self.top = top

    def result(self) -> Tensor:
        """The mean [t, G, D]; zeros for a row that no key was allowed for."""
        return self.mean / self.total.masked_fill(self.total == 0, 1.0)


def attend_blocks(
    q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, positions: Tensor, precision: Precision
) -> Tensor:
    """Exact softmax attention over the keys of the chosen blocks, up to each query's own position.

    `q` [t, H, D], `keys` and `values` [n, KV, D] of one sequence, bfloat16; `blocks` int [t, KV, K], a block b being
    keys 64b … 64b+63 and −1 an unused entry; `positions` int [t]. Keys past a query's position are not seen, and
    what lies in blocks nobody chose is never read into a result. Returns [t, H, D], bfloat16 or (ORACLE) float64.
    """
    tokens, heads, dim = q.shape
    out = torch.empty(tokens, heads, dim, dtype=torch.float64, device=q.device)
    group = heads // keys.shape[1]
    within = torch.arange(BLOCK, device=q.device)
    step = max(1, _budget(q.device) // max(1, blocks.shape[-1] * BLOCK * dim))
    for kv_head in range(keys.shape[1]):
        mine = _heads_of(kv_head, heads, keys.shape[1])
        for first in range(0, tokens, step):
            rows = slice(first, first + step)
            chosen = blocks[rows, kv_head].long()
            chosen = chosen[:, (chosen >= 0).any(0)]  # entries that no query of the piece uses cost nothing
            index = chosen[..., None] * BLOCK + within
            used = (chosen >= 0)[..., None]
            allowed = (used & (index <= positions[rows, None, None])).flatten(1)
            index = index.flatten(1).clamp(0, keys.shape[0] - 1)
            unseen = ~allowed[..., None]
            softmax = _RunningSoftmax((index.shape[0], group), dim, q.device)
            logits = _logits(q[rows, mine], keys[index, kv_head].masked_fill(unseen, 0.0), allowed)
            softmax.add(logits, values[index, kv_head].masked_fill(unseen, 0.0))
            out[rows, mine] = softmax.result()
    return bf16(out, precision)


def attend_dense(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, precision: Precision) -> Tensor:
    """Exact causal softmax attention: query i sees keys 0 … positions[i].

    `q` [t, H, D], `keys` and `values` [n, KV, D] of one sequence, bfloat16; `positions` int [t], each below n.
    Returns [t, H, D], bfloat16 or (ORACLE) float64.
    """
    tokens, heads, dim = q.shape
    out = torch.empty(tokens, heads, dim, dtype=torch.float64, device=q.device)
    count = keys.shape[0]
    group = heads // keys.shape[1]
    step = max(1, _budget(q.device) // (group * max(1, min(count, _KEY_PIECE))))
    for kv_head in range(keys.shape[1]):
        mine = _heads_of(kv_head, heads, keys.shape[1])
        for first in range(0, tokens, step):
            rows = slice(first, first + step)
            last_seen = int(positions[rows].max())
            softmax = _RunningSoftmax((positions[rows].shape[0], group), dim, q.device)
            for begin in range(0, min(count, last_seen + 1), _KEY_PIECE):
                piece = slice(begin, min(begin + _KEY_PIECE, count))
                index = torch.arange(piece.start, piece.stop, device=q.device)
                seen = index[None, :] <= positions[rows, None]
                softmax.add(_logits(q[rows, mine], keys[None, piece, kv_head], seen), values[None, piece, kv_head])
            out[rows, mine] = softmax.result()
    return bf16(out, precision)


def output_gate(attended: Tensor, gate: Tensor, precision: Precision) -> Tensor:
    """Attention's output × sigmoid(gate), both [t, H·D] bfloat16: the sigmoid is rounded, then the product."""
    return mul_bf16(attended, sigmoid_bf16(gate, precision), precision)
