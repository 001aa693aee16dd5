"""A whole bench in this process: rows for winners, losers and cheats, nothing lost."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any, cast

import pytest

from workbench import competitor, fingerprint
from workbench.competitor import Competitor, Entrant, checked
from workbench.contract import contract
from workbench.record import Failure, Measurement, Status, Verdict
from workbench.store import Store
from workbench.sweep import Plan, Sweep, higher
from workbench.timing.limits import Ceilings
from workbench.timing.protocol import SETTINGS
from workbench.worker import Worker

PLANTED = str(Path(__file__).with_name("planted.py"))
GENEROUS = {"device": "cpu", "read_bytes_per_s": 1e15, "copy_bytes_per_s": 1e15, "flops_per_s": {"bf16": 1e18}}


def plan(*names: str, **changes: Any) -> Plan:
    law = contract("residual_rmsnorm")
    fields: dict[str, Any] = {
        "contract": law,
        "workloads": [law.workload(tokens=2, hidden=64)],
        "entrants": [Entrant(name, name.partition("#")[0]) for name in names],
        "device": "cpu",
        "machine": fingerprint.machine("cpu"),
        "budget_s": 60.0,
        "seeds": [0],
        "plugins": [PLANTED],
        "edges": False,
        "timeout_s": 100.0,
    }
    return Plan(**{**fields, **changes})


@pytest.fixture(autouse=True)
def short_races(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and small blocks: what is tested is what becomes of them."""
    short = dataclasses.replace(SETTINGS["cpu"], block_s=0.02, samples=(1, 3), rounds=(6, 8))
    monkeypatch.setitem(SETTINGS, "cpu", short)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(str(tmp_path / "store.db"))
    made.add_ceilings(fingerprint.key(fingerprint.machine("cpu")), GENEROUS)
    return made


def test_every_kind_of_row(store: Store) -> None:
    told: list[str] = []
    names = ("good", "slow", "wrong", "late_crash", "forges", "caches", "hands_off")
    outcome = Sweep(plan(*names), store, tell=told.append).run()
    (result,) = outcome.results
    rows: dict[str, Measurement] = {row.label: row for row in result.rows}
    assert [row.label for row in result.rows[:2]] == ["good", "slow"]
    good, slow = rows["good"], rows["slow"]
    assert (good.status, good.rank, good.gate_passed) == (Status.OK, 1, True)
    assert good.share_of_limit is not None and good.call_us is not None and good.warm_us is not None
    assert good.rounds_us and len(good.seeds) == len(good.rounds_us) == len(good.conditions)
    assert slow.verdict is Verdict.SLOWER and slow.versus == "good"
    assert rows["wrong"].status is Status.FAILED_GATE and "wrong values in out" in str(rows["wrong"].reason)
    assert rows["late_crash"].status is Status.CRASHED and "exit code 4" in str(rows["late_crash"].reason)
    assert rows["forges"].status is Status.FORGED and "by the parent's clock" in str(rows["forges"].reason)
    assert rows["caches"].status is Status.FAILED_GATE and "of a timed call" in str(rows["caches"].reason)
    assert rows["hands_off"].status is Status.FAILED_GATE and "of a timed call" in str(rows["hands_off"].reason)
    assert all(row.latency_us is None for row in result.rows[2:])
    kept = store.measurements(run=outcome.run)
    assert [row["id"] for row in kept] == result.ids
    assert [row.measurement for row in kept] == result.rows
    assert store.get(outcome.run)[1]["status"] == "finished"
    assert {row["label"]: row["passed"] for row in store.gates(outcome.run)} == {
        name: name != "wrong" for name in names
    }


def test_below_the_limit_is_no_record(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def crawling(self: Sweep, key: str, *, again: bool) -> Ceilings:
        asked.append(again)
        return Ceilings("cpu", 1.0, 1.0, {})

    monkeypatch.setattr(Sweep, "_ceilings", crawling)
    outcome = Sweep(plan("good"), store, tell=lambda _: None).run()
    (row,) = outcome.results[0].rows
    assert row.status is Status.BELOW_LIMIT and row.latency_us is None and row.rounds_us
    assert asked == [False, True]


def test_interrupted_gates_and_races_are_kept_and_gone_on_with(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "sources", lambda op, plugins=(): "as they are")  # an editor may be open
    law = contract("residual_rmsnorm")
    asked = plan("good", workloads=[law.workload(tokens=2, hidden=64), law.workload(tokens=3, hidden=64)])

    def stop(workload: Any, race: Any) -> None:
        if workload["tokens"] == 3 and len(race.seeds) == 3:
            raise KeyboardInterrupt

    outcome = Sweep(asked, store, tell=lambda _: None, on_race=stop).run()
    assert outcome.interrupted and [result.stopped == "interrupted" for result in outcome.results] == [False, True]
    cut = outcome.results[1].rows
    assert {row.status for row in cut} == {Status.INTERRUPTED}
    assert all(len(row.rounds_us) == 3 and "3 rounds; so far" in str(row.reason) for row in cut)
    assert store.get(outcome.run)[1]["status"] == "interrupted"
    assert len(store.measurements(run=outcome.run)) == 1

    told: list[str] = []
    again = Sweep(asked, store, tell=told.append).run()
    assert (again.run, again.resumed, again.interrupted) == (outcome.run, True, False)
    assert [result.kept for result in again.results] == [True, False]
    assert sum("gate" in line and "is kept" in line for line in told) == 1
    assert not any("gating" in line for line in told)
    assert again.results[0].rows == outcome.results[0].rows
    assert len(store.gates(again.run)) == 2 and len(store.measurements(run=again.run)) == 2
    assert (
        store.unfinished_run(asked.request, fingerprint.key(asked.machine), fingerprint.sources(law.name, [PLANTED]))
        is None
    )


class Scripted:
    """A worker that answers from a list of functions; its clock is the test's."""

    def __init__(self, clock: list[float], **answers: Any) -> None:
        """See the class."""
        self.clock, self.answers, self.hello, self.pid = clock, answers, {"uuid": None}, None

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Answer one request."""
        return self.answers[what](**arguments)


def rival(monkeypatch: pytest.MonkeyPatch, sample_us: float, really_us: float) -> Competitor:
    """A competitor of four sets whose worker says `sample_us` a call where a call takes `really_us`."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(competitor, "waiting", lambda pid: 0.0)

    def block(count: int, **_: Any) -> dict[str, Any]:
        clock[0] += count * 4 * really_us * 1e-6 + 1e-3
        return {"samples_us": [sample_us] * count}

    def span(passes: int) -> dict[str, Any]:
        clock[0] += passes * 4 * really_us * 1e-6 + 1e-4
        return {}

    worker = Scripted(
        clock,
        set_up=lambda **_: {"mode": "graph", "sets": 4, "why_eager": None, "sample_s": 0.01},
        block=block,
        span=span,
        pause=lambda: clock.__setitem__(0, clock[0] + 1e-4) or {},
        warm=lambda count, seed: {"samples_us": [sample_us] * count},
        calls=lambda count: {"call_us": [9.0] * count, "launch_us": [5.0] * count},
    )
    made = Competitor(Entrant("x", "x"), plan("good").workloads[0], cast(Worker, worker))
    made.set_up(4)
    return made


def test_the_parents_clock_believes_honest_times(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = rival(monkeypatch, 10.0, 10.0)
    assert set(honest.block(1).samples_us) == {10.0}
    honest.finish(10.0)
    assert honest.figures == {"warm_us": 10.0, "call_us": 9.0, "launch_us": 5.0}


def test_the_parents_clock_denies_forged_times(monkeypatch: pytest.MonkeyPatch) -> None:
    too_slow = rival(monkeypatch, 1e6, 10.0)
    with pytest.raises(Failure, match="in a block that took") as raised:
        too_slow.block(1)
    assert raised.value.status is Status.FORGED
    for claimed in (0.001, 1.0, 3.0):
        too_fast = rival(monkeypatch, claimed, 10.0)
        too_fast.block(1)
        with pytest.raises(Failure, match="by the parent's clock calls without a pause take 10") as raised:
            too_fast.finish(claimed)
        assert raised.value.status is Status.FORGED


def test_ceilings_only_rise() -> None:
    one = {"read_bytes_per_s": 2.0, "copy_bytes_per_s": None, "flops_per_s": {"bf16": 5.0, "fp8": None}}
    other = {"read_bytes_per_s": 1.0, "copy_bytes_per_s": 3.0, "flops_per_s": {"bf16": 6.0, "fp8": None}}
    assert higher(one, other) == {
        "read_bytes_per_s": 2.0,
        "copy_bytes_per_s": 3.0,
        "flops_per_s": {"bf16": 6.0, "fp8": None},
    }


@pytest.mark.parametrize("samples", [None, "1", [1.0], [1.0, float("nan")], [1.0, 0.0], [1.0, -2.0], [1.0, "2"]])
def test_samples_must_be_positive_numbers(samples: Any) -> None:
    with pytest.raises(Failure) as raised:
        checked(samples, 2)
    assert raised.value.status is Status.FORGED
