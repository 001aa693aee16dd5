"""A whole `bench`: every workload, every entrant, gated, raced, kept; and going on where a run was cut off."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from workbench import fingerprint
from workbench.competitor import Competitor, Entrant
from workbench.contract import Contract, Workload
from workbench.race import Race, Standing
from workbench.record import Failure, Measurement, Mode, Status
from workbench.rows import Facts, records_of
from workbench.store import Row, Store
from workbench.timing.limits import Ceilings, limit_us
from workbench.timing.protocol import BELOW
from workbench.worker import Worker

MEMORY_SHARE = 0.8
"""Of the free memory, what all rivals' working sets may fill."""

HOST_MEMORY = 4 << 30
"""Most bytes of working sets of all rivals together on a CPU, where memory is everybody's."""

CEILING_S = {"cuda": 6.0, "cpu": 2.0}
"""How long the ceilings of a machine are measured."""

GATES = 4
"""Most gates at a time: half as many as there are cores, but at least two, since compilers and interpreters use one."""

Tell = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a bench is asked to do.

    `machine` is what a worker on `device` says of it. `budget_s` is the race's time a workload, `seeds` those of the
    gate, `edges` whether it also checks the contract's edge workloads.
    """

    contract: Contract
    workloads: Sequence[Workload]
    entrants: Sequence[Entrant]
    device: str
    machine: Mapping[str, Any]
    budget_s: float
    seeds: Sequence[int] = (0, 1, 2)
    plugins: Sequence[str] = ()
    timeout_s: float = 300.0
    edges: bool = True
    command: str = ""

    @property
    def request(self) -> str:
        """Hash of what is asked: the same request goes on where it was interrupted."""
        asked = {
            "op": self.contract.name,
            "workloads": [workload.label for workload in self.workloads],
            "entrants": [[e.label, e.variant, dict(e.parameters)] for e in self.entrants],
            "device": self.device,
            "budget": self.budget_s,
            "seeds": list(self.seeds),
            "plugins": list(self.plugins),
            "timeout": self.timeout_s,
            "edges": self.edges,
        }
        return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclasses.dataclass
class Result:
    """One workload's race: rows by place, the rest after them. `kept` says that it was done by the run before."""

    workload: Workload
    rows: list[Measurement]
    ids: list[str]
    stopped: str
    kept: bool = False


@dataclasses.dataclass
class Outcome:
    """What a bench came to. `interrupted` is set if Ctrl-C ended it: the results are then those that were kept."""

    run: str
    results: list[Result]
    machine: dict[str, Any]
    ceilings: Ceilings | None
    resumed: bool
    interrupted: bool = False


class Sweep:
    """Runs a plan against a store; `tell` gets a line whenever something is done, `on_race` the race after a round."""

    def __init__(self, plan: Plan, store: Store, *, fresh: bool = False, tell: Tell = print,
                 on_race: Callable[[Workload, Race], None] | None = None) -> None:  # fmt: skip
        """See the class; nothing runs yet."""
        self.plan, self.store, self.fresh, self.tell, self.on_race = plan, store, fresh, tell, on_race
        self._workers: dict[str, Worker] = {}
        self._gates: dict[tuple[str, str], Row] = {}
        self._gate_ids: dict[tuple[str, str], str] = {}
        self._race: Race | None = None
        self._outcome: Outcome | None = None

    def run(self) -> Outcome:
        """Do it. Ctrl-C (KeyboardInterrupt) ends all workers, keeps what is there and returns, marked as interrupted.

        Raises Failure only if no worker can be started at all.
        """
        pool = ThreadPoolExecutor(max(2, min(GATES, fingerprint.cores() // 2)))
        try:
            return self._run(pool)
        except KeyboardInterrupt:
            self._retire()
            outcome = self._outcome
            if outcome is None:
                raise
            self.store.end_run(outcome.run, "interrupted")
            outcome.interrupted = True
            return outcome
        finally:
            self._retire()
            pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, pool: ThreadPoolExecutor) -> Outcome:
        plan = self.plan
        machine = dict(plan.machine)
        key = fingerprint.key(machine)
        code = fingerprint.code(plan.contract.name, plan.plugins)
        before = None if self.fresh else self.store.unfinished_run(plan.request, key, code["sources"])
        if before is None:
            run = self.store.start_run(plan.command, plan.request, machine, key, code["sources"], code["commit"])
        else:
            run = str(before["id"])
            self.store.end_run(run, "running")
            self._gates = {(row["label"], row["workload"]): row for row in self.store.gates(run)}
        self._outcome = outcome = Outcome(run, [], machine, None, before is not None)
        outcome.ceilings = self._ceilings(key, again=False)
        done = self._finished(run) if before is not None else {}
        for workload in plan.workloads:
            if workload.label in done:
                outcome.results.append(done[workload.label])
                self.tell(f"{workload.label}: kept from the interrupted run {run}")
                continue
            self._one(workload, pool, outcome, key, code["commit"])
        self.store.end_run(run, "finished")
        return outcome

    def _finished(self, run: str) -> dict[str, Result]:
        """Workloads whose race is in the store, every entrant accounted for."""
        rows: dict[str, list[Row]] = {}
        for row in self.store.measurements(run=run):
            rows.setdefault(row["workload"], []).append(row)
        labels = {entrant.label for entrant in self.plan.entrants}
        return {
            workload.label: Result(
                workload,
                [row.measurement for row in rows[workload.label]],
                [row["id"] for row in rows[workload.label]],
                "kept",
                kept=True,
            )
            for workload in self.plan.workloads
            if labels <= {row["label"] for row in rows.get(workload.label, ())}
        }

    def _one(
        self, workload: Workload, pool: ThreadPoolExecutor, outcome: Outcome, key: str, revision: str | None
    ) -> None:
        """Gate and race one workload, and keep it."""
        plan = self.plan
        everybody = [Competitor(e, workload, self._worker(e.label), plan.plugins) for e in plan.entrants]
        failures: dict[str, Failure] = {}
        self._each(pool, everybody, failures, lambda rival: self._enter_and_gate(rival, outcome.run))
        racing = [rival for rival in everybody if rival.label not in failures]
        self._set_up(racing, failures)
        racing = [rival for rival in racing if rival.label not in failures]
        race = self._race = Race(racing, plan.budget_s, on_round=lambda race: self._tell_round(workload, race))
        standings: list[Standing] = []
        final = False
        try:
            race.run()
            self._afterwards(racing, race, workload, outcome, key)
            standings, final = race.standings(), True
        except KeyboardInterrupt:
            self._retire()
            raise
        finally:
            for label, track in race.tracks.items():
                if track.failure is not None:
                    failures[label] = track.failure
            facts = Facts(outcome.machine, key, self._gate_ids, self._limit_us(workload, outcome))
            records = records_of(plan.contract, everybody, race, failures, standings, facts)
            if final or any(record.rounds_us for record in records):
                ids = self.store.add_measurements(outcome.run, records, revision=revision, final=final)
                outcome.results.append(Result(workload, records, ids, race.stopped if final else "interrupted"))
        for rival in everybody:
            with contextlib.suppress(Failure):
                if rival.label not in failures:
                    rival.release()
        self.tell(f"{workload.label}: {len(standings)} raced, {race.stopped}")

    def _enter_and_gate(self, rival: Competitor, run: str) -> None:
        """Load and gate a rival; the gate's outcome is kept at once. A gate passed by the interrupted run stands."""
        rival.enter()
        workload, label = rival.workload.label, rival.label
        kept = self._gates.get((label, workload))
        if kept is not None and kept["source_hash"] == rival.source_hash:
            self._gate_ids[label, workload] = kept["id"]
            self.tell(f"{workload}: {label}'s gate {kept['id']} is kept from the interrupted run")
            if not kept["passed"]:
                raise Failure(Status(kept["status"]), kept["reason"] or "failed its gate")
        else:
            self.tell(f"{workload}: gating {label}")
            status, reason, record = self._gate(rival)
            self._gate_ids[label, workload] = self.store.add_gate(
                run, self.plan.contract.name, label, workload, rival.source_hash, status, reason, record
            )
            if status is not Status.OK:
                raise Failure(status, reason or status.value, str(record.get("detail", "")))
        rival.prepare()

    def _gate(self, rival: Competitor) -> tuple[Status, str | None, dict[str, Any]]:
        try:
            record = rival.gate(self.plan.seeds, edges=self.plan.edges)
        except Failure as failure:
            if failure.status is Status.INTERRUPTED:
                raise
            return failure.status, f"in its gate: {failure.reason}", {"detail": failure.detail}
        if record["passed"]:
            return Status.OK, None, record
        found = record["failure"]
        kinds = {"raised": Status.RAISED, "reference broke": Status.REFERENCE_BROKE}
        said = found["detail" if found["kind"] in kinds else "sentence"]
        return kinds.get(found["kind"], Status.FAILED_GATE), said, record

    def _set_up(self, racing: Sequence[Competitor], failures: dict[str, Failure]) -> None:
        """As many working sets for each as all want and memory holds, one more being made when contents are renewed.

        Where not even two fit for all together, they are made anew for each block.
        """
        if not racing:
            return
        free = self._free_memory(racing)
        room = int(MEMORY_SHARE * free) if self.plan.device.startswith("cuda") else min(free // 2, HOST_MEMORY)
        size = max(rival.set_bytes for rival in racing)
        fit = room // max(1, size * len(racing)) - 1
        tight = fit < 1
        wanted = min((rival.wanted for rival in racing if rival.mode is not Mode.INTERPRETED), default=1)
        count = min(wanted, fit) if not tight else min(wanted, 2, room // max(1, size) - 1)
        for rival in racing:
            try:
                if count < 1:
                    have = f"{room / 2**30:.1f} GiB"
                    raise Failure(
                        Status.OUT_OF_MEMORY, f"a working set and its renewal take {2 * size / 2**30:.1f} GiB of {have}"
                    )
                rival.set_up(count, tight=tight)
            except Failure as failure:
                if failure.status is Status.INTERRUPTED:
                    raise
                failures[rival.label] = failure
            if tight:
                rival.note = "the rivals don't fit into memory together: sets are made anew for each block"

    @staticmethod
    def _free_memory(racing: Sequence[Competitor]) -> int:
        for rival in racing:
            with contextlib.suppress(Failure):
                return int(rival.worker.ask("memory")["free"])
        return 0

    def _afterwards(
        self, racing: Sequence[Competitor], race: Race, workload: Workload, outcome: Outcome, key: str
    ) -> None:
        """Judge timed outputs, take the figures beside, and hold the medians against clock and limit."""
        medians = {standing.label: standing.latency.value for standing in race.standings()}
        for rival in racing:
            if rival.label not in medians:
                continue
            try:
                if not rival.tight:
                    rival.judge()
                rival.finish(medians[rival.label])
                self._check_limit(medians[rival.label], workload, outcome, key)
            except Failure as failure:
                if failure.status is Status.INTERRUPTED:
                    raise
                race.tracks[rival.label].failure = failure

    def _check_limit(self, median_us: float, workload: Workload, outcome: Outcome, key: str) -> None:
        """BELOW_LIMIT if a median can't be; the ceilings are measured once more before anybody is accused."""
        for last in (False, True):
            limit = self._limit_us(workload, outcome)
            if limit is None or median_us >= BELOW * limit:
                return
            if not last:
                outcome.ceilings = self._ceilings(key, again=True)
        raise Failure(
            Status.BELOW_LIMIT, f"claims {median_us:.4g} µs where this machine can't do better than {limit:.4g} µs"
        )

    def _limit_us(self, workload: Workload, outcome: Outcome) -> float | None:
        return limit_us(self.plan.contract.cost(workload), outcome.ceilings) if outcome.ceilings else None

    def _ceilings(self, key: str, *, again: bool) -> Ceilings | None:
        """This machine's ceilings: from the store, or measured now and kept; the better of both if `again`."""
        known = self.store.ceilings(key)
        if known is not None and not again and not self.fresh:
            return Ceilings.from_json(known)
        self.tell("measuring what this machine can do at best")
        seconds = CEILING_S["cuda" if self.plan.device.startswith("cuda") else "cpu"]
        worker = self._worker("ceilings")
        try:
            found = worker.ask("ceilings", seconds=seconds, timeout=120.0)
        except Failure as failure:
            if failure.status is Status.INTERRUPTED:
                raise
            self.tell(f"the ceilings could not be measured: {failure}")
            return Ceilings.from_json(known) if known else None
        finally:
            worker.kill()
        if known is not None and again:
            found = higher(known, found)
        self.store.add_ceilings(key, found)
        return Ceilings.from_json(found)

    def _worker(self, label: str) -> Worker:
        if label not in self._workers:
            self._workers[label] = Worker(self.plan.device, timeout=self.plan.timeout_s)
        return self._workers[label]

    def _each(self, pool: ThreadPoolExecutor, rivals: Sequence[Competitor], failures: dict[str, Failure],
              do: Callable[[Competitor], None]) -> None:  # fmt: skip
        """Do something with all rivals, a few at a time; what fails is noted."""
        jobs: dict[Future[None], Competitor] = {pool.submit(do, rival): rival for rival in rivals}
        for job in _completed(jobs):
            failure = job.exception()
            if isinstance(failure, Failure):
                if failure.status is Status.INTERRUPTED:
                    raise KeyboardInterrupt
                failures[jobs[job].label] = failure
            elif failure is not None:
                raise failure

    def _tell_round(self, workload: Workload, race: Race) -> None:
        if self.on_race is not None:
            self.on_race(workload, race)

    def _retire(self) -> None:
        for worker in self._workers.values():
            worker.retire()


def _completed(jobs: dict[Future[None], Competitor]) -> Iterator[Future[None]]:
    """Jobs as they finish, waiting in short steps so that Ctrl-C is heard at once."""
    left = set(jobs)
    while left:
        done, left = wait(left, timeout=0.2, return_when=FIRST_COMPLETED)
        yield from done


def higher(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The better of two measurements of ceilings, figure by figure."""
    merged = dict(other)
    for name in ("read_bytes_per_s", "copy_bytes_per_s"):
        merged[name] = max(filter(None, (one.get(name), other.get(name))), default=None)
    rates = {**one["flops_per_s"], **other["flops_per_s"]}
    merged["flops_per_s"] = {
        name: max(filter(None, (one["flops_per_s"].get(name), other["flops_per_s"].get(name))), default=None)
        for name in rates
    }
    return merged


def default_device() -> str:
    """`cuda` where there is a GPU, else `cpu`; asked of the driver without making a context."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
