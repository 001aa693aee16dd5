"""Verdicts from made-up samples: noisy, two-humped, drifting, with outliers."""

from __future__ import annotations

import numpy
import pytest

from workbench.record import Verdict
from workbench.timing.protocol import SETTINGS, Settings
from workbench.timing.stats import Interval, band, compare, judge, latency, order_ranks, ratio, unpaired

GPU = SETTINGS["graph"]


def noisy(rounds: int, centre: float, spread: float, seed: int) -> dict[int, float]:
    draw = numpy.random.default_rng(seed)
    return {i: float(x) for i, x in enumerate(centre * (1 + spread * draw.standard_normal(rounds)))}


@pytest.mark.parametrize("spread", [0.002, 0.01])
def test_equal_rivals_are_never_told_apart(spread: float) -> None:
    found = [compare(noisy(20, 100, spread, 2 * i), noisy(20, 100, spread, 2 * i + 1), GPU).verdict for i in range(50)]
    assert found == [Verdict.SAME] * 50


def test_an_offset_of_one_percent_between_processes_is_the_same() -> None:
    found = [compare(noisy(12, 101, 0.004, 2 * i), noisy(12, 100, 0.004, 2 * i + 1), GPU).verdict for i in range(50)]
    assert found == [Verdict.SAME] * 50


def test_clear_differences() -> None:
    fast, slow = noisy(12, 90, 0.01, 1), noisy(12, 100, 0.01, 2)
    assert compare(fast, slow, GPU).verdict is Verdict.FASTER
    assert compare(slow, fast, GPU).verdict is Verdict.SLOWER
    assert compare(fast, slow, GPU).ratio.value == pytest.approx(0.9, rel=0.02)


def test_verdicts_never_turn_round() -> None:
    """Whatever the noise, two runs of one race never say FASTER and SLOWER of the same pair."""
    for difference in (0.98, 0.95, 0.9):
        found = {
            compare(noisy(8, difference * 50, 0.03, 7 * i), noisy(8, 50, 0.03, 7 * i + 3), GPU).verdict
            for i in range(40)
        }
        assert Verdict.SLOWER not in found


def test_much_noise_is_undecided() -> None:
    assert compare(noisy(8, 100, 0.3, 5), noisy(8, 100, 0.3, 6), GPU).verdict is Verdict.UNDECIDED


def test_common_drift_cancels() -> None:
    """Both slow down by a half as the card heats up; paired rounds still show the five per cent between them."""
    heat = numpy.linspace(1, 1.5, 20)
    fast = {i: 95 * h for i, h in enumerate(heat)}
    slow = {i: 100 * h for i, h in enumerate(heat)}
    assert compare(fast, slow, GPU).verdict is Verdict.FASTER
    assert latency([[x] for x in fast.values()]).high > latency([[x] for x in slow.values()]).low


def test_two_humps_and_outliers() -> None:
    draw = numpy.random.default_rng(3)
    humps = {i: float(x) for i, x in enumerate(draw.choice([100.0, 140.0], 15))}
    steady = noisy(15, 100, 0.005, 4)
    assert compare(humps, steady, GPU).verdict is not Verdict.FASTER
    spoilt = dict(noisy(15, 100, 0.005, 8))
    spoilt[3], spoilt[9] = 5000.0, 900.0
    assert compare(spoilt, steady, GPU).verdict is Verdict.SAME


def test_few_rounds_tell_only_large_differences() -> None:
    few = {0: 100.0, 1: 101.0, 2: 99.0}
    assert compare({0: 90.0, 1: 91.0, 2: 90.5}, few, GPU).verdict is Verdict.UNDECIDED
    assert compare({0: 10.0, 1: 10.1, 2: 9.9}, few, GPU).verdict is Verdict.FASTER
    assert compare({0: 10.0, 1: 10.1}, few, GPU).verdict is Verdict.UNDECIDED
    assert compare({7: 10.0}, few, GPU).rounds == 0


def test_tiny_times_need_a_tenth_of_a_microsecond() -> None:
    assert band(1.0, GPU) == pytest.approx(0.1)
    assert band(100.0, GPU) == pytest.approx(0.02)
    fast, slow = noisy(12, 1.95, 0.002, 1), noisy(12, 2.0, 0.002, 2)
    assert compare(fast, slow, GPU).verdict is Verdict.SAME


def test_intervals() -> None:
    assert order_ranks(6) == (0, 5)
    assert order_ranks(20) == (5, 14)
    rounds = [[float(i), float(i), 1000.0] for i in range(1, 22)]
    found = latency(rounds)
    assert (found.value, found.low, found.high) == (11.0, 6.0, 16.0)
    assert latency([[3.0, 1.0, 2.0]]) == Interval(2.0, 1.0, 3.0)
    with pytest.raises(ValueError, match="no samples"):
        latency([[]])


def test_interval_of_the_median_holds_it() -> None:
    hits = 0
    for seed in range(200):
        draw = numpy.random.default_rng(seed).lognormal(0, 0.5, 15)
        found = latency([[float(x)] for x in draw])
        hits += found.low <= 1.0 <= found.high
    assert hits >= 185  # 95 % of 200 is 190; order statistics are on the safe side


def test_ratio_of_constants() -> None:
    assert ratio([2.0] * 8, [1.0] * 8) == Interval(2.0, 2.0, 2.0)


def test_separate_races() -> None:
    a, b = list(noisy(15, 100, 0.005, 1).values()), list(noisy(9, 100, 0.005, 2).values())
    assert unpaired(a, b, GPU).verdict is Verdict.SAME
    assert unpaired([x * 1.1 for x in a], b, GPU).verdict is Verdict.SLOWER


@pytest.mark.parametrize(
    ("low", "value", "high", "rounds", "expected"),
    [
        (0.9, 0.95, 0.979, 8, Verdict.FASTER),
        (0.9, 0.95, 0.99, 8, Verdict.UNDECIDED),
        (1.021, 1.05, 1.1, 8, Verdict.SLOWER),
        (0.97, 1.01, 1.03, 8, Verdict.SAME),
        (0.97, 1.03, 1.035, 8, Verdict.UNDECIDED),
        (0.9, 0.95, 0.979, 4, Verdict.UNDECIDED),
        (0.1, 0.1, 0.1, 2, Verdict.UNDECIDED),
    ],
)
def test_judge(low: float, value: float, high: float, rounds: int, expected: Verdict) -> None:
    assert judge(Interval(value, low, high), rounds, Settings(band=0.02).band) is expected
