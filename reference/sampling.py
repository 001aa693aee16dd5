"""Choosing the next token: greedy, temperature, top-k, top-p, with counter-based random numbers.

A draw depends on nothing but the row's seed, its step and the token's id, so that it repeats on any device,
in any batch, and however the vocabulary is split among threads.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .numerics import ORACLE, Precision, f32

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF


def greedy(logits: Tensor) -> Tensor:
    """Id of the highest logit of each row of [B, V], the lowest id among equals: int32 [B]."""
    ids = torch.arange(logits.shape[-1], device=logits.device)
    top = logits.amax(-1, keepdim=True)
    return torch.where(logits == top, ids, logits.shape[-1]).amin(-1).to(torch.int32)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox-4x32-10 (Salmon et al. 2011): four 32-bit words for a counter of four and a key of two.

    All are int64 tensors with values 0 … 2^32−1, broadcast against each other.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product of two 32-bit words wraps in int64, but its 64 bits are the right ones.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, low0 = (first >> 32) & _MASK, first & _MASK
        high1, low1 = (second >> 32) & _MASK, second & _MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def gumbel(seed: Tensor, step: Tensor, vocabulary: int) -> Tensor:
    """Gumbel noise float64 [B, vocabulary] for int64 `seed` [B] and `step` [B].

    Key = the seed's low and high word, counter = (token id, step's low word, its high word, 0). The first word w
    gives u = (w + ½)·2^−32, and the noise is −ln(−ln u).
    """
    ids = torch.arange(vocabulary, device=seed.device)
    step_low, step_high = step[:, None] & _MASK, (step[:, None] >> 32) & _MASK
    key = (seed[:, None] & _MASK, (seed[:, None] >> 32) & _MASK)
    word = philox((ids, step_low, step_high, torch.zeros_like(step_low)), key)[0]
    uniform = (word.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform))


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Rows of a vocabulary in the order in which filters take them: highest logit first, lower ids first.

    `ids` int64 [B, V]; `before` float64 [B, V]: the probability, among what top-k leaves, of all that come
    earlier; `in_top_k` and `allowed` bool [B, V], the second after top-p too.
    """

    ids: Tensor
    before: Tensor
    in_top_k: Tensor
    allowed: Tensor


def candidates(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Candidates:
    """Apply top-k, then top-p on the renormalised rest, to logits / temperature `scaled` [B, V].

    `top_k` [B] (0: off) keeps the k highest; `top_p` [B] (1: off) the smallest prefix whose probability reaches
    p: the token that crosses p is kept. Ties go to lower ids, and one token always stays.
    """
    vocabulary = scaled.shape[1]
    ordered, ids = torch.sort(scaled.double(), dim=1, descending=True, stable=True)
    rank = torch.arange(vocabulary, device=scaled.device)
    keep = torch.where(top_k > 0, top_k.clamp(max=vocabulary), vocabulary)[:, None].long()
    in_top_k = rank < keep
    weight = torch.exp(ordered - ordered[:, :1]).masked_fill(~in_top_k, 0.0)
    sums = weight.cumsum(1)
    before = (sums - weight) / sums[:, -1:]
    p = top_p.double()[:, None]
    allowed = in_top_k & ((before < p) | (p >= 1) | (rank == 0))
    return Candidates(ids, before, in_top_k, allowed)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    step: Tensor,
    precision: Precision = ORACLE,
) -> Tensor:
    """Token of each row: int32 [B].

    `logits` [B, V]; `temperature` float32 [B]: 0 is greedy, below 0 a padded row (−1 comes back); `top_k` int32 [B]
    (0: off), `top_p` float32 [B] (1: off), `seed` and `step` int64 [B]. Otherwise the token is the maximum of
    logit/temperature + Gumbel noise over the tokens the filters leave, the lowest id at ties: a draw from their
    softmax. MODEL rounds logit/temperature to float32; noise and sums are float64 in both precisions.
    """
    scaled = scale(logits, temperature, precision)
    kept = candidates(scaled, top_k, top_p)
    allowed = torch.zeros_like(kept.allowed).scatter(1, kept.ids, kept.allowed)
    scores = (scaled.double() + gumbel(seed, step, logits.shape[1])).masked_fill(~allowed, -torch.inf)
    drawn = torch.where(temperature == 0, greedy(logits), greedy(scores))
    return torch.where(temperature < 0, -1, drawn).to(torch.int32)


def scale(logits: Tensor, temperature: Tensor, precision: Precision) -> Tensor:
    """Logits over temperature [B, V]; rows without a positive temperature are divided by 1."""
    divisor = torch.where(temperature > 0, temperature, 1.0).double()[:, None]
    return f32(logits.double() / divisor, precision)
