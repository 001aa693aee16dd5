"""Races between made-up rivals: order, stopping, failures, interruption."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from workbench.race import Block, Race
from workbench.record import Failure, Status, Verdict
from workbench.timing.protocol import SETTINGS, Settings


class Made:
    """A rival that needs no time; `us` gives the time of a call in round n."""

    def __init__(self, label: str, us: Callable[[int], float], log: list[str], mode: str = "graph") -> None:
        """See the class."""
        self.label, self.us, self.log, self.settings = label, us, log, SETTINGS[mode]
        self.count = 0
        self.seeds: list[int] = []

    settings: Settings

    def block(self, seed: int) -> Block:
        """Three equal samples."""
        self.log.append(self.label)
        self.seeds.append(seed)
        self.count += 1
        return Block((self.us(self.count),) * 3, 0.1)


def noise(centre: float, seed: int, spread: float = 0.005) -> Callable[[int], float]:
    draw = random.Random(seed)
    return lambda _: centre * draw.gauss(1, spread)


def race(*rivals: Made, budget: float = 1e9) -> Race:
    now = iter(float(x) for x in range(10**6))
    return Race(rivals, budget, rng=random.Random(1), clock=lambda: next(now))


def test_stops_when_all_is_clear_and_drops_the_beaten_early() -> None:
    log: list[str] = []
    rivals = [Made("a", noise(10, 1), log), Made("b", noise(12, 2), log), Made("c", noise(10.02, 3), log)]
    run = race(*rivals)
    run.run()
    assert run.stopped == "every verdict is clear"
    places = {standing.label: standing for standing in run.standings()}
    verdicts = {label: place.comparison.verdict for label, place in places.items() if place.comparison}
    first = next(label for label, place in places.items() if place.rank == 1)
    other = "c" if first == "a" else "a"
    assert verdicts == {first: Verdict.SAME, other: Verdict.SAME, "b": Verdict.SLOWER}
    assert places[first].versus == other
    assert len(run.tracks["b"].blocks) <= len(run.tracks[first].blocks) < 30


def test_order_is_shuffled_and_contents_are_shared() -> None:
    log: list[str] = []
    rivals = [Made(name, noise(10, i, 0.2), log) for i, name in enumerate("abc")]
    run = race(*rivals, budget=60)
    run.run()
    rounds = [tuple(log[i : i + 3]) for i in range(0, len(log) - 2, 3)]
    assert all(set(order) == set("abc") for order in rounds)
    assert len(set(rounds)) > 2
    assert rivals[0].seeds[:5] == rivals[1].seeds[:5] == run.seeds[:5]
    assert len(set(run.seeds)) == len(run.seeds)


def test_a_winner_beats_everybody() -> None:
    log: list[str] = []
    run = race(*(Made(name, noise(us, i), log) for i, (name, us) in enumerate((("a", 8.0), ("b", 10.0), ("c", 9.0)))))
    run.run()
    first = run.standings()[0]
    assert (first.label, first.versus) == ("a", "c")
    assert first.comparison is not None and first.comparison.verdict is Verdict.FASTER


def test_budget_ends_it() -> None:
    log: list[str] = []
    run = race(Made("a", noise(10, 1, 0.5), log), Made("b", noise(10, 2, 0.5), log), budget=30)
    run.run()
    assert run.stopped == "the budget is spent"
    assert all(len(track.blocks) >= 1 for track in run.tracks.values())


def test_a_failure_costs_one_rival() -> None:
    log: list[str] = []

    def fails(count: int) -> float:
        if count == 3:
            raise Failure(Status.CRASHED, "gone")
        return 5.0

    run = race(Made("a", noise(10, 1), log), Made("bad", fails, log), Made("b", noise(11, 2), log))
    run.run()
    assert run.tracks["bad"].failure is not None
    assert [standing.label for standing in run.standings()] == ["a", "b"]
    assert run.stopped == "every verdict is clear"


def test_nobody_left() -> None:
    def fails(_: int) -> float:
        raise Failure(Status.CRASHED, "gone")

    run = race(Made("bad", fails, []))
    run.run()
    assert (run.stopped, run.standings()) == ("nobody is left", [])


def test_interruption_keeps_what_was_sampled() -> None:
    log: list[str] = []

    def stops(count: int) -> float:
        if count == 4:
            raise KeyboardInterrupt
        return 10.0

    run = race(Made("a", noise(10, 1, 0.3), log), Made("b", stops, log))
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert len(run.tracks["b"].blocks) == 3


def test_alone_it_is_sampled_and_compared_with_nobody() -> None:
    run = race(Made("a", noise(10, 1), []))
    run.run()
    (only,) = run.standings()
    assert (only.rank, only.versus, only.comparison) == (1, None, None)
    assert len(run.tracks["a"].blocks) == SETTINGS["graph"].rounds[0]


def test_a_slow_interpreter_needs_few_rounds() -> None:
    log: list[str] = []
    run = race(Made("a", noise(10, 1), log, "cpu"), Made("slow", noise(9000, 2), log, "interpreted"))
    run.run()
    assert len(run.tracks["slow"].blocks) <= SETTINGS["interpreted"].rounds[1]
    comparison = run.standings()[1].comparison
    assert comparison is not None and comparison.verdict is Verdict.SLOWER
