"""The law of sampling with one rule bent at a time; every one of these must fail the gate of `sampling`."""

from __future__ import annotations

from workbench.contract import Mutant

_LOWEST = "return torch.where(logits == top, ids, logits.shape[-1]).amin(-1).to(torch.int32)"
_STEP_WORDS = "step_low, step_high = step[:, None] & _MASK, (step[:, None] >> 32) & _MASK"
_KEY = "key = (seed[:, None] & _MASK, (seed[:, None] >> 32) & _MASK)"
_NOISE = "return -torch.log(-torch.log(uniform))"
_WORDS = "c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0"
_KEEP = "keep = torch.where(top_k > 0, top_k.clamp(max=vocabulary), vocabulary)[:, None].long()"
_WEIGHT = "weight = torch.exp(ordered - ordered[:, :1]).masked_fill(~in_top_k, 0.0)"
_BEFORE = "before = (sums - weight) / sums[:, -1:]"
_ALLOWED = "allowed = in_top_k & ((before < p) | (p >= 1) | (rank == 0))"
_ORDER = "ordered, ids = torch.sort(scaled.double(), dim=1, descending=True, stable=True)"
_DIVISOR = "divisor = torch.where(temperature > 0, temperature, 1.0).double()[:, None]"
_SCORES = "scores = (scaled.double() + gumbel(seed, step, logits.shape[1]))"
_DRAWN = "drawn = torch.where(temperature == 0, greedy(logits), greedy(scores))"


def _sampling(name: str, rule: str, old: str, new: str, caught_by: str = "ordinary") -> Mutant:
    return Mutant(name, rule, "sampling.py", old, new, caught_by)


MUTANTS = (
    _sampling(
        "greedy_highest_id",
        "the lowest id among equals",
        _LOWEST,
        "return torch.where(logits == top, ids, -1).amax(-1).to(torch.int32)",
        "ties",
    ),
    _sampling(
        "greedy_tail_missing",
        "the last tokens count",
        "top = logits.amax(",
        "top = logits[..., : -(logits.shape[-1] // 8)].amax(",
    ),
    _sampling("greedy_draws", "temperature 0 draws nothing", _DRAWN, "drawn = greedy(scores)"),
    _sampling("always_greedy", "a positive temperature draws", _DRAWN, "drawn = greedy(logits)"),
    _sampling(
        "temperature_multiplied",
        "logits are divided by the temperature",
        _DIVISOR,
        _DIVISOR.replace("[:, None]", "[:, None].reciprocal()"),
    ),
    _sampling(
        "temperature_ignored",
        "logits are divided by the temperature",
        _DIVISOR,
        _DIVISOR.replace("temperature, 1.0)", "1.0, 1.0)"),
    ),
    _sampling(
        "filters_before_temperature",
        "top-p sees the probabilities at this temperature",
        "kept = candidates(scaled, top_k, top_p)",
        "kept = candidates(logits, top_k, top_p)",
    ),
    _sampling("top_k_one_more", "top-k keeps k tokens", _KEEP, _KEEP.replace("top_k.clamp(", "(top_k + 1).clamp(")),
    _sampling(
        "top_k_one_less", "top-k keeps k tokens", _KEEP, _KEEP.replace("top_k.clamp(", "(top_k - 1).clamp(min=1, ")
    ),
    _sampling("top_k_ignored", "top-k holds", _KEEP, _KEEP.replace("top_k > 0", "top_k < 0")),
    _sampling(
        "ties_to_higher_ids",
        "filters give ties to lower ids",
        _ORDER,
        _ORDER.replace("double()", "double().flip(1)") + "\n    ids = vocabulary - 1 - ids",
        "ties",
    ),
    _sampling(
        "top_p_without_top_k",
        "top-p renormalises what top-k leaves",
        _WEIGHT,
        "weight = torch.exp(ordered - ordered[:, :1])",
    ),
    _sampling("top_p_excludes_crossing", "the token that crosses p stays", _BEFORE, "before = sums / sums[:, -1:]"),
    _sampling(
        "top_p_one_more",
        "top-p keeps the smallest prefix",
        _ALLOWED,
        _ALLOWED.replace("before < p", "before.roll(1, 1) < p"),
    ),
    _sampling("top_p_ignored", "top-p holds", _ALLOWED, "allowed = in_top_k"),
    _sampling("min_p", "top-p is a sum, not a share of the highest", _BEFORE, "before = 1 - weight"),
    _sampling("gumbel_sign", "the noise is −ln(−ln u)", _NOISE, "return torch.log(-torch.log(uniform))"),
    _sampling("exponential_noise", "the noise is −ln(−ln u), not −ln u", _NOISE, "return -torch.log(uniform)"),
    _sampling(
        "noise_scaled_too",
        "only logits are divided by the temperature",
        _SCORES,
        _SCORES[:-1] + " / temperature.clamp(min=0.01)[:, None])",
    ),
    _sampling("philox_nine_rounds", "Philox has ten rounds", "_ROUNDS = 10", "_ROUNDS = 9"),
    _sampling(
        "philox_words_crossed",
        "Philox's words change places",
        _WORDS,
        _WORDS.replace("high1 ^ c1 ^ k0", "high0 ^ c1 ^ k0").replace("high0 ^ c3 ^ k1", "high1 ^ c3 ^ k1"),
    ),
    _sampling(
        "philox_key_fixed", "Philox's key grows with each round", "_WEYL = (0x9E3779B9, 0xBB67AE85)", "_WEYL = (0, 0)"
    ),
    _sampling(
        "step_ignored", "each step draws anew", _STEP_WORDS, _STEP_WORDS.replace("step[:, None]", "0 * step[:, None]")
    ),
    _sampling(
        "step_high_word_ignored",
        "the step has 64 bits",
        _STEP_WORDS,
        _STEP_WORDS.replace("(step[:, None] >> 32)", "0 * step[:, None]"),
    ),
    _sampling("seed_ignored", "each seed draws anew", _KEY, _KEY.replace("seed[:, None]", "0 * seed[:, None]")),
    _sampling(
        "seed_high_word_ignored",
        "the seed has 64 bits",
        _KEY,
        _KEY.replace("(seed[:, None] >> 32)", "0 * seed[:, None]"),
    ),
    _sampling("seed_of_first_row", "each row has its own seed", _KEY, _KEY.replace("seed[:, None]", "seed[:1, None]")),
    _sampling(
        "token_id_from_one",
        "the counter is the token's id from 0",
        "ids = torch.arange(vocabulary, device=seed.device)",
        "ids = torch.arange(1, vocabulary + 1, device=seed.device)",
    ),
)
