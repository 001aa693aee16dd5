"""What samples say, and what they don't: medians, ratios, verdicts. Pure functions of numbers.

A race yields rounds; in each round every rival gave a block of samples. A round counts as one observation (its
median), since samples within a block share clocks and memory placement. Intervals are of 95 %.

Verdict of A against B, from the ratio r = A/B with interval [low, high] (paired bootstrap over common rounds)
and the band b = max(2 % on a GPU, 0.1 µs of B's time; see `protocol.Settings`):
FASTER if high < 1 − b, SLOWER if low > 1 + b, SAME if |r − 1| ≤ b and [low, high] lies within ±2b, else UNDECIDED.
Processes that run the very same kernel differ by up to about 1 % (placement in memory), which no number of rounds
averages out; that is what the band is for. With three to five rounds, the bootstrap knows too little: only a
difference beyond `FEW` counts then; with fewer than three nothing does.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence

import numpy
import scipy.stats

from workbench.record import Verdict
from workbench.timing.protocol import CONFIDENCE, FEWEST, Settings

ENOUGH = 6
"""Rounds from which on the bootstrap's interval is believed."""

FEW = 0.25
"""The band with three to five rounds."""

Rounds = Sequence[Sequence[float]]
"""Samples in µs, a sequence a round."""


@dataclasses.dataclass(frozen=True)
class Interval:
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A rival against another: verdict, ratio of their times, rounds they had in common."""

    verdict: Verdict
    ratio: Interval
    rounds: int


def round_medians(rounds: Rounds) -> list[float]:
    """Median of each round that has samples."""
    return [float(numpy.median(samples)) for samples in rounds if len(samples)]


def latency(rounds: Rounds) -> Interval:
    """Median of the rounds' medians with its interval.

    The interval is that of order statistics (distribution-free, so humps and outliers can't fool it); with fewer
    than six rounds no order statistics reach 95 %, and the extremes are given: of the rounds, or of the
    samples if there was one round. ValueError without samples.
    """
    medians = sorted(round_medians(rounds))
    if not medians:
        raise ValueError("no samples")
    value = float(numpy.median(medians))
    if len(medians) == 1:
        samples = [sample for samples in rounds for sample in samples]
        return Interval(value, min(samples), max(samples))
    low, high = order_ranks(len(medians))
    return Interval(value, medians[low], medians[high])


def order_ranks(count: int, confidence: float = CONFIDENCE) -> tuple[int, int]:
    """Ranks (from 0) of the order statistics that hold the median of `count` values with `confidence`.

    The narrowest symmetric pair; the extremes where none reaches the confidence.
    """
    low = max(int(scipy.stats.binom.ppf((1 - confidence) / 2, count, 0.5)) - 1, 0)
    return low, count - 1 - low


def ratio(ours: Sequence[float], theirs: Sequence[float], *, resamples: int = 999, seed: int = 0) -> Interval:
    """Our time over theirs from paired rounds (medians of equal length ≥ 1): median of the quotients.

    The interval is a percentile bootstrap over rounds. Pairing takes out what both felt in that round: clocks,
    temperature, the contents of that round's inputs.
    """
    quotients = numpy.asarray(ours, dtype=float) / numpy.asarray(theirs, dtype=float)
    value = float(numpy.median(quotients))
    if len(quotients) < ENOUGH or float(numpy.ptp(quotients)) == 0.0:
        return Interval(value, float(quotients.min()), float(quotients.max()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy warns of degenerate resamples, which are harmless here
        result = scipy.stats.bootstrap(
            (quotients,),
            numpy.median,
            confidence_level=CONFIDENCE,
            n_resamples=resamples,
            method="percentile",
            vectorized=True,
            axis=-1,
            random_state=numpy.random.default_rng(seed),
        )
    interval = result.confidence_interval
    return Interval(value, min(float(interval.low), value), max(float(interval.high), value))


def compare(ours: Mapping[int, float], theirs: Mapping[int, float], settings: Settings) -> Comparison:
    """Verdict of a rival against another from their rounds' medians, by number of the round.

    With no round in common the verdict is UNDECIDED at the ratio of all that there is. ValueError if one has none.
    """
    if not ours or not theirs:
        raise ValueError("no samples")
    common = sorted(set(ours) & set(theirs))
    if not common:
        quotient = float(numpy.median(list(ours.values())) / numpy.median(list(theirs.values())))
        return Comparison(Verdict.UNDECIDED, Interval(quotient, quotient, quotient), 0)
    found = ratio([ours[index] for index in common], [theirs[index] for index in common])
    their_time = float(numpy.median([theirs[index] for index in common]))
    return Comparison(judge(found, len(common), band(their_time, settings)), found, len(common))


def unpaired(ours: Sequence[float], theirs: Sequence[float], settings: Settings, *, seed: int = 0) -> Comparison:
    """Verdict from the rounds' medians of two separate races, which share no round.

    The interval of the ratio of medians comes from resampling both sides by themselves.
    """
    a, b = numpy.asarray(ours, dtype=float), numpy.asarray(theirs, dtype=float)
    value = float(numpy.median(a) / numpy.median(b))
    draw = numpy.random.default_rng(seed)
    tops = numpy.median(draw.choice(a, (999, len(a))), axis=1)
    bottoms = numpy.median(draw.choice(b, (999, len(b))), axis=1)
    low, high = numpy.quantile(tops / bottoms, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    found = Interval(value, min(float(low), value), max(float(high), value))
    rounds = min(len(a), len(b))
    return Comparison(judge(found, rounds, band(float(numpy.median(b)), settings)), found, rounds)


def band(their_time_us: float, settings: Settings) -> float:
    """The relative difference that counts as none, against a rival of this time."""
    return max(settings.band, settings.band_us / their_time_us)


def judge(found: Interval, rounds: int, width: float) -> Verdict:
    """The verdict for a ratio; see the head of this file."""
    if rounds < FEWEST:
        return Verdict.UNDECIDED
    if rounds < ENOUGH:
        width = max(width, FEW)
    if found.high < 1 - width:
        return Verdict.FASTER
    if found.low > 1 + width:
        return Verdict.SLOWER
    near = abs(found.value - 1) <= width and 1 - 2 * width <= found.low and found.high <= 1 + 2 * width
    return Verdict.SAME if near and rounds >= ENOUGH else Verdict.UNDECIDED
