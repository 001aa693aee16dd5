"""Racing rivals against each other: block by block, in shuffled order, until every verdict is clear.

Knows nothing of processes or devices: a rival is anything that gives blocks of samples. What went wrong with one is
kept as its failure, and the race goes on without it.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy

from workbench.record import Failure, Status, Verdict
from workbench.timing import stats
from workbench.timing.protocol import Settings

SURE = 2
"""Rounds in a row in which a verdict must stand before it stops a rival's sampling."""


@dataclasses.dataclass(frozen=True)
class Block:
    """Samples of one rival in one round, µs a call; the parent's own time for it; clocks and the like."""

    samples_us: tuple[float, ...]
    wall_s: float
    conditions: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Rival(Protocol):
    """Somebody in a race."""

    label: str

    @property
    def settings(self) -> Settings:
        """The protocol's numbers for how it is timed."""

    def block(self, seed: int) -> Block:
        """One block of samples on contents from `seed` on. Raises Failure."""


@dataclasses.dataclass
class Track:
    """What is known of one rival: its blocks by round, and its failure if it had one."""

    rival: Rival
    blocks: dict[int, Block] = dataclasses.field(default_factory=dict)
    failure: Failure | None = None
    steady: int = 0
    last: tuple[str, Verdict] | None = None

    @property
    def medians(self) -> dict[int, float]:
        """Median of each round, µs."""
        return {index: float(numpy.median(block.samples_us)) for index, block in self.blocks.items()}

    @property
    def rounds_us(self) -> tuple[tuple[float, ...], ...]:
        """Raw samples, a tuple a round."""
        return tuple(block.samples_us for block in self.blocks.values())


@dataclasses.dataclass(frozen=True)
class Standing:
    """A rival's place: rank from 1, figure with interval, and the comparison with `versus` (None if alone)."""

    label: str
    rank: int
    latency: stats.Interval
    versus: str | None
    comparison: stats.Comparison | None


@dataclasses.dataclass
class Race:
    """A race and its state; `run` may be interrupted at any time, what was sampled stays."""

    rivals: Sequence[Rival]
    budget_s: float
    rng: random.Random = dataclasses.field(default_factory=random.SystemRandom)
    clock: Callable[[], float] = time.monotonic
    on_round: Callable[[Race], None] | None = None
    tracks: dict[str, Track] = dataclasses.field(init=False)
    seeds: list[int] = dataclasses.field(default_factory=list)
    stopped: str = "not started"

    def __post_init__(self) -> None:
        """Line up."""
        self.tracks = {rival.label: Track(rival) for rival in self.rivals}

    @property
    def alive(self) -> list[Track]:
        """Rivals that have not failed."""
        return [track for track in self.tracks.values() if track.failure is None]

    def run(self) -> None:
        """Take rounds until all verdicts are clear, the budget is spent, or nobody is left."""
        end = self.clock() + self.budget_s
        active = list(self.tracks.values())
        self.stopped = "nobody is left"
        while self.alive:
            seed = self.rng.randrange(1 << 32, 1 << 62)
            self.seeds.append(seed)
            for track in self.rng.sample(active, len(active)):
                if track.blocks and self.clock() >= end:
                    self.stopped = "the budget is spent"
                    return
                try:
                    track.blocks[len(self.seeds) - 1] = track.rival.block(seed)
                except Failure as failure:
                    if failure.status is Status.INTERRUPTED:
                        raise
                    track.failure = failure
            active = self._unclear()
            if self.on_round is not None:
                self.on_round(self)
            if not active:
                self.stopped = self._ending()
                return

    def _ending(self) -> str:
        """Why nobody needs to go on."""
        if not self.alive:
            return "nobody is left"
        verdicts = [standing.comparison.verdict for standing in self.standings() if standing.comparison is not None]
        return "the most rounds were taken" if Verdict.UNDECIDED in verdicts else "every verdict is clear"

    def _unclear(self) -> list[Track]:
        """Who must go on: rivals whose verdict against the leader is open, and then the leader too."""
        alive = self.alive
        if not alive:
            return []
        leader = min(alive, key=lambda track: numpy.median(list(track.medians.values())))
        fewest, most = leader.rival.settings.rounds
        open_ = [track for track in alive if track is not leader and not self._clear(track, leader)]
        if len(leader.blocks) >= most or (not open_ and len(leader.blocks) >= fewest):
            return []
        return [leader, *open_]

    def _clear(self, track: Track, leader: Track) -> bool:
        """Whether a rival's verdict has stood long enough."""
        found = stats.compare(track.medians, leader.medians, track.rival.settings).verdict
        track.steady = track.steady + 1 if (leader.rival.label, found) == track.last else 1
        track.last = leader.rival.label, found
        fewest, most = track.rival.settings.rounds
        enough = len(track.blocks) >= fewest and found is not Verdict.UNDECIDED and track.steady >= SURE
        return enough or len(track.blocks) >= most

    def standings(self) -> list[Standing]:
        """Everybody who did not fail, the fastest first.

        The first is compared with its closest pursuer (FASTER only if it is FASTER than all), the rest with the first.
        """
        order = sorted(
            (track for track in self.alive if track.blocks), key=lambda track: stats.latency(track.rounds_us).value
        )
        found = []
        for rank, track in enumerate(order, start=1):
            versus, comparison = self._against(track, order)
            found.append(Standing(track.rival.label, rank, stats.latency(track.rounds_us), versus, comparison))
        return found

    @staticmethod
    def _against(track: Track, order: Sequence[Track]) -> tuple[str | None, stats.Comparison | None]:
        if len(order) < 2:
            return None, None
        if track is not order[0]:
            return order[0].rival.label, stats.compare(track.medians, order[0].medians, track.rival.settings)
        pairs = [(other, stats.compare(track.medians, other.medians, track.rival.settings)) for other in order[1:]]
        other, comparison = max(pairs, key=lambda pair: (pair[1].verdict is not Verdict.FASTER, pair[1].ratio.value))
        return other.rival.label, comparison
