"""One rival of a race in its worker: gated, prepared, sampled, and held against the parent's own clock."""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.contract import Workload
from workbench.fingerprint import Conditions
from workbench.race import Block
from workbench.record import Failure, Mode, Status
from workbench.timing.protocol import SETTINGS, Settings
from workbench.worker import Worker, load

LEAST_BLOCK_S = 60.0
"""A block may always take this long before it counts as a hang; slow ones ten times what was expected."""

WARM_SAMPLES = 5
CALLS = 40
SPANS = 6
"""Runs whose pace must all deny a claim before it is called forged."""


@dataclasses.dataclass(frozen=True)
class Entrant:
    """Who is asked to race: a variant by name, with the parameters given; `label` is unique in the race."""

    label: str
    variant: str
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Competitor:
    """An entrant on one workload in its worker. Methods raise Failure.

    The order is `enter`, `gate`, `prepare`, `set_up`, then blocks, then `judge` and `finish`.
    """

    def __init__(self, entrant: Entrant, workload: Workload, worker: Worker, plugins: Sequence[str] = ()) -> None:
        """See the class."""
        self.entrant, self.workload, self.worker, self.plugins = entrant, workload, worker, tuple(plugins)
        self.label = entrant.label
        self.parameters: dict[str, Any] = dict(entrant.parameters)
        self.origin = ""
        self.source_hash: str | None = None
        self.mode: Mode | None = None
        self.sets = 0
        self.set_bytes = 0
        self.wanted = 1
        self.note: str | None = None
        self.figures: dict[str, float | None] = {}
        self.tight = False
        self._sample_s = 0.0
        self._conditions: Conditions | None = None

    @property
    def settings(self) -> Settings:
        """The protocol's numbers for how it is timed."""
        return SETTINGS[(self.mode or Mode.CPU).value]

    def enter(self) -> None:
        """Load the variant for the workload."""
        answer = load(
            self.worker, self.entrant.variant, self.workload, parameters=self.entrant.parameters, plugins=self.plugins
        )
        self.parameters, self.origin = answer["parameters"], answer["origin"]
        self.source_hash = answer["source_hash"]
        if answer["where"] == "interpreter":
            self.mode = Mode.INTERPRETED

    def gate(self, seeds: Sequence[int], *, edges: bool = True) -> dict[str, Any]:
        """The gate's record, whether it passed or not; with `edges`, of the contract's edge workloads too."""
        return self.worker.ask("gate", seeds=list(seeds), regimes=None, options={"edges": edges})

    def prepare(self) -> None:
        """The one-off work, timed apart."""
        answer = self.worker.ask("prepare", seed=_nonce())
        self.set_bytes, self.wanted = int(answer["set_bytes"]), int(answer["sets"])
        self.figures["prepare_ms"] = answer["prepare_ms"]
        self.figures["first_call_ms"] = answer["first_call_ms"]

    def set_up(self, count: int, *, tight: bool = False) -> None:
        """At most `count` working sets; `tight` makes them anew for each block and frees them after."""
        answer = self.worker.ask("set_up", seed=_nonce(), count=count)
        self.mode = Mode(answer["mode"])
        self.sets = int(answer["sets"])
        self._sample_s = float(answer["sample_s"])
        if self._conditions is None:
            self._conditions = Conditions(self.worker.hello.get("uuid"))
        if answer["why_eager"]:
            self.note = f"not captured: {answer['why_eager']}"
        self.tight = tight
        if tight:
            self.worker.ask("release")

    def block(self, seed: int) -> Block:
        """One block; see `race.Rival`. FORGED if it claims more time than it took by the parent's clock."""
        if self.tight:
            self._make_sets()
        fewest, most = self.settings.samples
        count = max(fewest, min(most, int(self.settings.block_s / max(1e-6, self._sample_s))))
        conditions: dict[str, Any] = {}

        def read() -> None:
            if self._conditions is not None:
                conditions.update(self._conditions.read())

        start = time.perf_counter()
        answer = self.worker.ask(
            "block", count=count, seed=seed, timeout=max(LEAST_BLOCK_S, 10 * count * self._sample_s), meanwhile=read
        )
        wall = time.perf_counter() - start
        samples = checked(answer.get("samples_us"), count)
        claimed = sum(samples) * self.sets * 1e-6
        if claimed > wall * 1.01 + 1e-4:
            raise Failure(
                Status.FORGED,
                f"claims {claimed:.4f} s of timed calls in a block that took {wall:.4f} s by the parent's clock",
            )
        self._sample_s = wall / count
        if self.tight:
            self.judge()
            self.worker.ask("release")
        return Block(samples, wall, conditions)

    def judge(self) -> None:
        """Have the gate judge a set of the last block, chosen now. FAILED_GATE if it is wrong."""
        index = secrets.randbelow(self.sets)
        answer = self.worker.ask("judge", index=index)
        if answer["wrong"] is not None:
            raise Failure(Status.FAILED_GATE, f"{answer['wrong']} (seed {answer['seed']})")

    def finish(self, median_us: float) -> None:
        """The figures beside the main one, and the pace of an untimed run held against it. FORGED if that denies it."""
        if self.tight:
            self._make_sets()
        if self.mode is not Mode.INTERPRETED:
            samples = checked(self.worker.ask("warm", count=WARM_SAMPLES, seed=_nonce())["samples_us"], WARM_SAMPLES)
            self.figures["warm_us"] = statistics.median(samples)
            count = max(3, min(CALLS, int(self.settings.block_s / max(1e-6, median_us * 1e-6))))
            calls = self.worker.ask("calls", count=count)
            self.figures["call_us"] = statistics.median(checked(calls["call_us"], count))
            if self.mode in (Mode.GRAPH, Mode.EAGER):
                self.figures["launch_us"] = statistics.median(checked(calls["launch_us"], count))
        self._check_pace(median_us)

    def _check_pace(self, median_us: float) -> None:
        """Run the sets without a pause until it takes long enough to be judged by the parent's clock."""
        claim_us = median_us
        if self.mode is Mode.EAGER:  # launched one by one, the run can't be faster than the host launches
            claim_us = max(median_us, self.figures.get("launch_us") or 0.0)
        allowed = self.settings.slack * claim_us
        overhead = min(_seconds(lambda: self.worker.ask("pause")) for _ in range(3))
        calls, pace = self.sets, math.inf
        for attempt in range(12):
            start, waited = time.perf_counter(), self._waited()
            self.worker.ask("span", passes=calls // self.sets)
            # on a crowded machine both processes wait for a core, which is no time of the variant's
            wall = time.perf_counter() - start - overhead - (self._waited() - waited)
            pace = min(pace, wall / calls * 1e6)
            if pace <= allowed + 2.0:
                return
            if wall >= self.settings.span_s and attempt + 1 >= SPANS:
                break
            calls *= 1 if wall >= self.settings.span_s else 4
        raise Failure(
            Status.FORGED,
            f"claims {median_us:.3g} µs a call; by the parent's clock calls without a pause take {pace:.3g} µs each "
            "(or something else kept the machine busy: measure again when it is quiet)",
        )

    def _waited(self) -> float:
        """Seconds that the worker and this process have waited for a core so far, as the kernel counts them."""
        return waiting(self.worker.pid) + waiting(os.getpid())

    def release(self) -> None:
        """Free the working sets."""
        self.worker.ask("release")

    def _make_sets(self) -> None:
        self.worker.ask("set_up", seed=_nonce(), count=self.sets)


def waiting(pid: int | None) -> float:
    """Seconds the main thread of a process has waited for a core; 0 where the system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def checked(samples: Any, count: int) -> tuple[float, ...]:
    """Samples as the worker sent them, if they are `count` positive numbers; else FORGED."""
    sound = isinstance(samples, list) and len(samples) == count
    if not sound or not all(isinstance(x, (int, float)) and math.isfinite(x) and x > 0 for x in samples):
        raise Failure(Status.FORGED, f"sent something else than {count} positive times")
    return tuple(float(x) for x in samples)


def _nonce() -> int:
    """A seed for contents nobody has seen; those of rounds are drawn from another range (`race.Race`)."""
    return (1 << 62) + secrets.randbelow(1 << 61)


def _seconds(run: Any) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
