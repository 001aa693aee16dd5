"""sampling: the next token of each sequence from its logits."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from jaxtyping import BFloat16, Float32, Int32, Int64
from torch import Tensor

from reference.random import integers, normal, stream_key
from workbench.contract import Axis, Contract, Cost, Expected, Output, Tolerance, Workload, workloads

OP = "sampling"
REFERENCE_ELEMENTS = 1 << 21
"""Logits the reference takes at once: each costs some 200 bytes of scratch."""
MODES = ("mixed", "greedy", "temperature", "top_k", "top_p", "top_k_top_p")
"""What rows ask for; `mixed` has rows of each of the other kinds, in turn."""

REGIMES = ("ordinary", "large", "flat", "ties", "masked", "edges", "padded", "strided")
"""What each draws: `large` logits of about 80, so that an exponential taken without the maximum overflows; `flat`
nearly equal logits; `ties` whole numbers, many of them the highest; `masked` nine tokens of ten at −inf; `edges`
extreme settings (top-k 1 and past the vocabulary, top-p next to 0 and 1, temperatures of 1/100 and 10); `padded`
rows of temperature −1 full of NaN; `strided` rows further apart than the vocabulary."""


def signature(
    logits: BFloat16[Tensor, "batch vocab"],
    temperature: Float32[Tensor, "batch"],
    top_k: Int32[Tensor, "batch"],
    top_p: Float32[Tensor, "batch"],
    seed: Int64[Tensor, "batch"],
    step: Int64[Tensor, "batch"],
    tokens: Int32[Tensor, "batch"],
) -> None:
    """Write each row's next token.

    temperature 0: the highest logit, the lowest id among equals. Otherwise top-k keeps the k highest (0: all; ties
    to lower ids), then top-p, on the rest renormalised at this temperature, the smallest prefix in descending
    order whose probability reaches p (1: all; the token that crosses p stays, ties to lower ids). Of those, the
    token with the highest logit/temperature + g is taken, the lowest id among equals. g = −ln(−ln u), u = (w +
    ½)·2^−32, w the first word of Philox-4x32-10 with key = (seed's low, high word) and counter = (id, step's low word,
    its high word, 0).

    Mutated: `tokens`. A row of temperature −1 is padding and keeps its token. Scores within float32 rounding of the
    best, and tokens within it of top-p's edge, are right as well; greedy rows are exact. The rows of `logits` may be
    strided; every live row has a finite logit, and −inf marks a token that can't be taken.
    """


AXES = {
    "batch": Axis(1, "sequences, one token each", high=128),
    "vocab": Axis(73448, "tokens to choose from", low=8, high=1 << 19),
    "mode": Axis("mixed", "what the rows ask for", choices=MODES),
}


def make_inputs(workload: Workload, seed: int, regime: str, device: torch.device) -> dict[str, Any]:
    """Every argument by name."""
    batch, vocab = workload["batch"], workload["vocab"]

    def lots(name: str, high: int, *shape: int) -> Tensor:
        return integers(stream_key(OP, seed, regime, name), shape or (batch,), high, device=device)

    size, centre = {"large": (20.0, 80.0), "flat": (0.02, 1.0)}.get(regime, (2.5, 0.0))
    logits = normal(stream_key(OP, seed, regime, "logits"), (batch, vocab), scale=size, offset=centre, device=device)
    if regime == "ties":
        logits = logits.round().clamp(max=4.0)
        logits[:, 0] = -4.0  # so that a lazy zero is never the lowest of the highest
    elif regime == "masked":
        open_ = lots("mask", 10, batch, vocab) == 0
        open_.scatter_(1, lots("open", vocab, batch, 1), True)
        logits = logits.masked_fill(~open_, -torch.inf)
    elif regime == "strided":
        wide = torch.full((batch, vocab + 64), torch.nan, dtype=logits.dtype, device=device)
        wide[:, :vocab] = logits
        logits = wide[:, :vocab]

    temperature = (0.3 + lots("temperature", 1000) * 1.2e-3).float()
    ceiling = torch.tensor([2, 5, 20, 50, 400], device=device)[lots("top_k", 5)].clamp(max=vocab)
    top_k = 1 + lots("less", 1 << 20) % ceiling
    top_p = torch.tensor([0.1, 0.5, 0.8, 0.95, 0.99], device=device)[lots("top_p", 5)]
    if regime == "edges":
        temperature = torch.tensor([0.01, 1.0, 10.0], device=device)[lots("temperature", 3)]
        top_k = torch.tensor([1, 2, vocab - 1, vocab, vocab + 7], device=device)[lots("top_k", 5)]
        top_p = torch.tensor([1e-6, 0.3, 0.9999, 1.0], device=device)[lots("top_p", 4)]
    kind = _kinds(workload["mode"], seed, batch, device)
    temperature = torch.where(kind == 1, 0.0, temperature)
    top_k = torch.where((kind == 3) | (kind == 5), top_k, 0)
    top_p = torch.where((kind == 4) | (kind == 5), top_p, 1.0)
    if regime == "padded":
        rows = slice(1, None, 3)  # of one sequence alone none is padding
        temperature[rows], logits[rows], top_k[rows] = -1.0, torch.nan, -1
    return {
        "logits": logits,
        "temperature": temperature.float(),
        "top_k": top_k.to(torch.int32),
        "top_p": top_p.float(),
        "seed": _wide(lots("seed high", 1 << 31), lots("seed low", 1 << 31)),
        "step": _wide(lots("step high", 3), lots("step low", 1 << 31)),
        "tokens": torch.empty(batch, dtype=torch.int32, device=device),
    }


def _kinds(mode: str, seed: int, batch: int, device: torch.device) -> Tensor:
    """Index in `MODES` of what each row asks for, int64 [batch]."""
    if mode != "mixed":
        return torch.full((batch,), MODES.index(mode), device=device)
    return 1 + (torch.arange(batch, device=device) + seed) % (len(MODES) - 1)


def _wide(high: Tensor, low: Tensor) -> Tensor:
    """64-bit numbers of both signs of which every bit but the lowest varies, from two below 2^31."""
    return (((high << 1) ^ 1) << 32) - (low << 1)


def reference(law: ModuleType, args: Mapping[str, Any], precision: Any) -> dict[str, Expected]:
    """The law a few rows at a time, with the facts by which a token within rounding is told from a wrong one."""
    batch, vocab = args["logits"].shape
    rows = max(1, REFERENCE_ELEMENTS // vocab)
    values, scores, slacks = [], [], []
    for start in range(0, batch, rows):
        part = {name: args[name][start : start + rows] for name in args if name != "tokens"}
        live = part["temperature"] >= 0
        part["logits"] = torch.where(live[:, None], part["logits"], 0.0)
        values.append(law.sampling.sample(**part, precision=precision))
        perturbed, slack = _facts(law, part, values[-1], precision)
        scores.append(perturbed)
        slacks.append(slack)
    facts = {"perturbed": torch.cat(scores), "slack": torch.cat(slacks)}
    return {"tokens": Expected(torch.cat(values), args["temperature"] >= 0, facts)}


def _facts(law: ModuleType, part: Mapping[str, Tensor], value: Tensor, precision: Any) -> tuple[Tensor, Tensor]:
    """Scores [rows, vocab] and slack [rows] such that exactly the right tokens lie within slack of the row's maximum.

    A float32 kernel errs in two places. Its scores are off by a few parts in 2^23 of their terms. And its sums of
    probabilities are off by about `edge`, so that it may cut top-p's prefix anywhere within `edge` of p. A cut
    further on adds tokens, and such a token wins only if it beats every token before it: the others among them
    are excluded. Where one beats the best of the certain tokens, the slack grows to keep that one right too.
    """
    logits, temperature = part["logits"], part["temperature"]
    scaled = law.sampling.scale(logits, temperature, precision).double()
    order = law.sampling.candidates(scaled, part["top_k"], part["top_p"])
    noisy = scaled + law.sampling.gumbel(part["seed"], part["step"], logits.shape[1])
    score = noisy.gather(1, order.ids)
    p = part["top_p"].double()[:, None]
    size = scaled.masked_fill(scaled.isinf(), 0.0).abs().amax(1, keepdim=True)
    edge = (64 + 2 * size) * 2.0**-23
    first = torch.arange(logits.shape[1], device=logits.device) == 0
    certain = order.in_top_k & ((order.before < p - edge) | (p >= 1) | first)
    possible = order.in_top_k & ((order.before < p + edge) | (p >= 1) | first)
    best = score.masked_fill(~certain, -torch.inf).amax(1, keepdim=True)
    winner = score.masked_fill(~certain, -torch.inf).argmax(1, keepdim=True)
    around = scaled.gather(1, order.ids.gather(1, winner)).abs() + best.abs()
    rounding = (16 + around) * 2.0**-21
    leading = score.masked_fill(~possible, -torch.inf)
    right = leading >= leading.cummax(1).values - rounding
    leading = leading.masked_fill(~right | leading.isneginf(), -torch.inf)
    slack = leading.amax(1) - best[:, 0] + rounding[:, 0]
    perturbed = torch.full_like(scaled, -torch.inf).scatter(1, order.ids, leading)
    greedy = temperature == 0
    alone = torch.full_like(scaled, -torch.inf).scatter(1, value.clamp(min=0).long()[:, None], 0.0)
    return torch.where(greedy[:, None], alone, perturbed), torch.where(greedy, 0.0, slack)


def cost(workload: Workload) -> Cost:
    """Each logit once; there are no matrix products."""
    batch = workload["batch"]
    return Cost(0.0, batch * (2 * workload["vocab"] + 28), 4 * batch)


PRESETS = {
    "smoke": workloads(
        OP,
        AXES,
        "smoke",
        {"batch": 1, "vocab": 4096},
        {"batch": 3, "vocab": 1031, "mode": "greedy"},
        {"batch": 63, "vocab": 1031},
        {"batch": 5, "vocab": 2048, "mode": "temperature"},
    ),
    "decode": workloads(
        OP,
        AXES,
        "decode",
        *({"batch": b, "mode": m} for m in MODES for b in ((1, 8, 32, 128) if m == "mixed" else (1, 32))),
    ),
    "long": workloads(OP, AXES, "long", {"batch": 1, "mode": "greedy"}, {"batch": 128, "mode": "top_k_top_p"}),
    "race": workloads(OP, AXES, "race", *({"batch": b, "mode": "greedy"} for b in (1, 8, 32, 64))),
}

CONTRACT = Contract(
    name=OP,
    summary="next tokens: greedy, temperature, top-k, top-p, seeded",
    signature=signature,
    axes=AXES,
    outputs={"tokens": Output(Tolerance.TOKENS, row_dims=0)},
    make_inputs=make_inputs,
    reference=reference,
    cost=cost,
    presets=PRESETS,
    regimes=REGIMES,
    gate_workloads=workloads(
        OP,
        AXES,
        "gate",
        *({"batch": 3, "vocab": v, "mode": "top_k_top_p"} for v in (63, 64, 65)),
        *({"batch": 10, "vocab": v} for v in (127, 128, 1025)),
        {"batch": 4, "vocab": 8191, "mode": "top_k"},
        {"batch": 4, "vocab": 8192, "mode": "top_p"},
        {"batch": 4, "vocab": 8193, "mode": "temperature"},
        {"batch": 1, "vocab": 73448, "mode": "top_k_top_p"},
    ),
)
