"""From a race to its records: who came where, with which figures, and who failed why."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.competitor import Competitor
from workbench.contract import Contract
from workbench.race import Race, Standing
from workbench.record import Failure, Measurement, Status
from workbench.timing.protocol import VERSION


@dataclasses.dataclass(frozen=True)
class Facts:
    """What all rows of a race share.

    `gates` are the gates' ids by rival and workload, `limit_us` the least time the machine allows.
    """

    machine: Mapping[str, Any]
    key: str
    gates: Mapping[tuple[str, str], str]
    limit_us: float | None


def records_of(
    contract: Contract,
    everybody: Sequence[Competitor],
    race: Race,
    failures: Mapping[str, Failure],
    standings: Sequence[Standing],
    facts: Facts,
) -> list[Measurement]:
    """A record for every rival: those placed by rank, then the others in the order they were named."""
    places = {standing.label: standing for standing in standings}
    last = len(everybody) + 1
    order = sorted(everybody, key=lambda rival: places[rival.label].rank if rival.label in places else last)
    return [_record(contract, rival, race, failures, places.get(rival.label), facts) for rival in order]


def _record(
    contract: Contract,
    rival: Competitor,
    race: Race,
    failures: Mapping[str, Failure],
    standing: Standing | None,
    facts: Facts,
) -> Measurement:
    track = race.tracks.get(rival.label)
    blocks = {} if track is None else track.blocks
    failure = failures.get(rival.label)
    if failure is None and standing is None:
        failure = _cut_off(race, rival.label)
    gate = facts.gates.get((rival.label, rival.workload.label))
    return Measurement(
        op=contract.name,
        variant=rival.entrant.variant,
        label=rival.label,
        origin=rival.origin,
        axes=dict(rival.workload.axes),
        preset=rival.workload.preset,
        parameters=rival.parameters,
        source_hash=rival.source_hash,
        status=Status.OK if failure is None else failure.status,
        reason=None if failure is None else failure.reason,
        detail=None if failure is None else failure.detail or None,
        protocol=VERSION,
        fingerprint=facts.machine,
        fingerprint_key=facts.key,
        gate=gate,
        gate_passed=gate is not None and (failure is None or bool(blocks)),
        mode=rival.mode,
        sets=rival.sets or None,
        set_bytes=rival.set_bytes or None,
        rounds_us=() if track is None else track.rounds_us,
        seeds=tuple(race.seeds[index] for index in blocks),
        conditions=tuple(block.conditions for block in blocks.values()),
        note=rival.note,
        **(_figures(rival, standing, facts) if failure is None and standing is not None else {}),
    )


def _figures(rival: Competitor, standing: Standing, facts: Facts) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "latency_us": standing.latency.value,
        "latency_low_us": standing.latency.low,
        "latency_high_us": standing.latency.high,
        "rank": standing.rank,
        "limit_us": facts.limit_us,
        "share_of_limit": None if facts.limit_us is None else facts.limit_us / standing.latency.value,
        "versus": standing.versus,
        **rival.figures,
    }
    if standing.comparison is not None:
        found = standing.comparison
        figures |= {"verdict": found.verdict, "ratio": found.ratio.value}
        figures |= {"ratio_low": found.ratio.low, "ratio_high": found.ratio.high}
    return figures


def _cut_off(race: Race, label: str) -> Failure:
    """Why a rival that did not fail has no place: the race was stopped."""
    track = race.tracks.get(label)
    if track is None or not track.blocks:
        return Failure(Status.INTERRUPTED, "stopped before it was sampled")
    medians = sorted(track.medians.values())
    return Failure(
        Status.INTERRUPTED, f"stopped after {len(medians)} rounds; so far {medians[len(medians) // 2]:.4g} µs a call"
    )
