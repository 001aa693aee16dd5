"""Every rival of a race as a benchmark; see conftest.py for how to call it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest

from workbench.contract import Workload
from workbench.record import Measurement, Status


class RaceClock:
    """The clock of the benchmarks: it shows the device time that a race measured, round after round."""

    def __init__(self) -> None:
        """At zero."""
        self.seconds = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.seconds

    def play(self, rounds_us: list[float]) -> Callable[[], None]:
        """A call that advances the clock by the next round's time a call."""
        times = iter(rounds_us)

        def advance() -> None:
            self.seconds += next(times) * 1e-6

        return advance


CLOCK = RaceClock()


@pytest.mark.benchmark(timer=CLOCK, warmup=False)
def bench_race(
    benchmark: Any, race: Callable[[Workload], dict[str, Measurement]], workload: Workload, rival: str
) -> None:
    """Replay what the race measured of `rival`; a rival that failed its gate fails here."""
    row = race(workload)[rival]
    if row.status in (Status.REFUSED, Status.UNAVAILABLE):
        pytest.skip(f"{row.status.value}: {row.reason}")
    assert row.status is Status.OK and row.gate_passed, f"{row.status.value}: {row.reason}"
    benchmark.group = f"{workload.op} {workload.label}"
    benchmark.extra_info.update(
        op=row.op,
        workload=workload.label,
        parameters=dict(row.parameters),
        mode=row.mode.value if row.mode else None,
        latency_us=row.latency_us,
        latency_low_us=row.latency_low_us,
        latency_high_us=row.latency_high_us,
        limit_us=row.limit_us,
        share_of_limit=row.share_of_limit,
        verdict=row.verdict.value if row.verdict else None,
        versus=row.versus,
        protocol=row.protocol,
        fingerprint_key=row.fingerprint_key,
        source_hash=row.source_hash,
    )
    rounds = [statistics.median(samples) for samples in row.rounds_us]
    benchmark.pedantic(CLOCK.play(rounds), rounds=len(rounds), iterations=1)
