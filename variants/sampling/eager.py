"""sampling in batched torch calls: one sort for the filters, one pass of random numbers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from workbench.contract import Workload
from workbench.variant import variant

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


@functools.lru_cache(maxsize=8)
def _ids(vocabulary: int, device: torch.device) -> Tensor:
    return torch.arange(vocabulary, device=device)


def _noise(seed: Tensor, step: Tensor, vocabulary: int) -> Tensor:
    """Gumbel noise float32 [B, vocabulary]: Philox-4x32-10 in int64, its logarithms in float64.

    Float32 would not do: the largest noise comes from u next to 1, where float32 has few steps.
    """
    key0, key1 = seed[:, None] & _MASK, (seed[:, None] >> 32) & _MASK
    c0: Tensor = _ids(vocabulary, seed.device)
    c1, c2 = step[:, None] & _MASK, (step[:, None] >> 32) & _MASK
    c3 = torch.zeros_like(c1)
    for _ in range(10):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((second >> 32) & _MASK) ^ c1 ^ key0, second & _MASK
        c2, c3 = ((first >> 32) & _MASK) ^ c3 ^ key1, first & _MASK
        key0, key1 = (key0 + _WEYL[0]) & _MASK, (key1 + _WEYL[1]) & _MASK
    uniform = c0.double().add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_().float()


def _first_of_highest(scores: Tensor) -> Tensor:
    """Lowest id of each row's maximum; argmax alone promises no particular one."""
    ids = _ids(scores.shape[1], scores.device)
    return torch.where(scores == scores.amax(1, keepdim=True), ids, scores.shape[1]).amin(1)


def _filtered(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`scaled` [B, V] with −inf for the tokens that top-k and then top-p leave out."""
    vocabulary = scaled.shape[1]
    ordered, order = torch.sort(scaled, dim=1, descending=True, stable=True)
    rank = _ids(vocabulary, scaled.device)
    keep = rank < torch.where(top_k > 0, top_k, vocabulary)[:, None]
    weight = torch.exp(ordered - ordered[:, :1]).masked_fill_(~keep, 0.0)
    sums = weight.cumsum(1, dtype=torch.float64)
    keep &= (sums - weight < top_p[:, None].double() * sums[:, -1:]) | (top_p >= 1)[:, None] | (rank == 0)
    return torch.full_like(scaled, -torch.inf).scatter_(1, order, ordered.masked_fill_(~keep, -torch.inf))


def _heuristic(workload: Workload) -> dict[str, Any]:
    """Leave out what no row of the workload asks for, as a server does that knows its requests."""
    mode = workload["mode"]
    return {"filters": mode not in ("greedy", "temperature"), "noise": mode != "greedy"}


@variant(tunables={"filters": (True, False), "noise": (True, False)}, heuristic=_heuristic)
def eager(
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
) -> None:
    """Every kind of row in the same calls, any batch and vocabulary, without reading anything back to the host.

    `filters=False` skips the sort (right only if no row has top-k or top-p), `noise=False` the random numbers (only if
    every row is greedy). Scores are float32; some sixty passes over [B, V] in 64-bit integers make the noise.
    """
    chosen = _first_of_highest(logits)
    if noise:
        scaled = logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]
        if filters:
            scaled = _filtered(scaled, top_k, top_p)
        scores = scaled.add_(_noise(seed, step, logits.shape[1]))
        chosen = torch.where(temperature == 0, chosen, _first_of_highest(scores))
    tokens.copy_(torch.where(temperature < 0, tokens, chosen.to(torch.int32)))
