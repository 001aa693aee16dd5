"""Every way a variant can end, and the worker that outlives it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from workbench.contract import Workload, contract
from workbench.record import Failure, Status
from workbench.worker import Worker, load, run_gate
from workbench.worker_process import status_of

PLANTED = str(Path(__file__).with_name("planted.py"))


@pytest.fixture(scope="module")
def workload() -> Workload:
    return contract("residual_rmsnorm").workload(tokens=2, hidden=32)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker("cpu", timeout=100) as made:
        yield made


def gate(variant: str, workload: Workload, worker: Worker, **options: Any) -> dict[str, Any]:
    return run_gate(variant, workload, device="cpu", seeds=[0], regimes=["ordinary"], plugins=[PLANTED],
                    worker=worker, edges=False, **options)  # fmt: skip


def test_a_gate_passed_and_a_gate_failed_are_results(worker: Worker, workload: Workload) -> None:
    assert gate("good", workload, worker)["passed"]
    found = gate("wrong", workload, worker)
    assert not found["passed"] and found["failure"]["kind"] == "wrong values"
    found = gate("raises", workload, worker)
    assert found["failure"]["kind"] == "raised" and "no such luck" in found["failure"]["sentence"]
    assert gate("leaves", workload, worker)["failure"]["kind"] == "raised"


@pytest.mark.parametrize(("variant", "said"), [("patches", "Tensor.clone is not"), ("watches", "every torch function")])
def test_what_the_gate_rests_on_is_not_replaced(workload: Workload, variant: str, said: str) -> None:
    with Worker("cpu", timeout=100) as own:
        found = gate(variant, workload, own)
    assert found["failure"]["kind"] == "gate tampered with" and said in found["failure"]["detail"]


@pytest.mark.parametrize(
    ("variant", "status", "said"),
    [
        ("unbuilt", Status.DID_NOT_BUILD, "incompatible types"),
        ("lacking", Status.UNAVAILABLE, "surely_not_installed"),
        ("picky", Status.REFUSED, "needs more tokens"),
        ("absent", Status.UNAVAILABLE, "has no variant 'absent'"),
    ],
)
def test_failures_that_leave_the_process_alive(
    worker: Worker, workload: Workload, variant: str, status: Status, said: str
) -> None:
    pid = worker.ask("hello")["pid"]
    with pytest.raises(Failure, match=said) as raised:
        gate(variant, workload, worker)
    assert raised.value.status is status
    assert worker.ask("hello")["pid"] == pid


@pytest.mark.parametrize(
    ("variant", "status", "said", "detail"),
    [
        ("exits", Status.CRASHED, "exit code 3", "about to leave"),
        ("segfaults", Status.CRASHED, "SIGSEGV", "Fatal Python error"),
        ("hungry", Status.OUT_OF_MEMORY, "allocate memory", "planted.py"),
        ("lost", Status.CUDA_ERROR, "illegal memory access", "planted.py"),
    ],
)
def test_deaths_cost_the_process_and_nothing_else(
    worker: Worker, workload: Workload, variant: str, status: Status, said: str, detail: str
) -> None:
    pid = worker.ask("hello")["pid"]
    with pytest.raises(Failure, match=said) as raised:
        gate(variant, workload, worker)
    assert raised.value.status is status
    assert detail in raised.value.detail
    assert worker.ask("hello")["pid"] != pid


def test_a_hang_is_cut_off_and_its_place_is_told(worker: Worker, workload: Workload) -> None:
    pid = worker.ask("hello")["pid"]
    load(worker, "hangs", workload, plugins=[PLANTED])
    with pytest.raises(Failure, match="took more than 2 s") as raised:
        worker.ask("prepare", seed=1, timeout=2)
    assert raised.value.status is Status.TIMED_OUT
    assert "in hangs" in raised.value.detail
    assert not alive(pid)


def test_a_retired_worker_stays_retired(workload: Workload) -> None:
    worker = Worker("cpu")
    worker.retire()
    with pytest.raises(Failure) as raised:
        worker.ask("hello")
    assert raised.value.status is Status.INTERRUPTED


def test_parameters_given_reach_the_variant(worker: Worker, workload: Workload) -> None:
    assert load(worker, "good", workload, parameters={"block": "2"}, plugins=[PLANTED])["parameters"] == {"block": 2}
    with pytest.raises(Failure, match="no tunable 'blok'; did you mean 'block'") as raised:
        load(worker, "good", workload, parameters={"blok": "2"}, plugins=[PLANTED])
    assert raised.value.status is Status.REFUSED


def test_what_exceptions_mean() -> None:
    assert status_of({"OutOfMemoryError", "RuntimeError"}, "CUDA out of memory") is Status.OUT_OF_MEMORY
    assert status_of({"AcceleratorError"}, "CUDA error: misaligned address") is Status.CUDA_ERROR
    assert status_of({"OutOfResources"}, "shared memory, Required: 300000") is Status.DID_NOT_BUILD
    assert status_of({"KeyError"}, "x") is Status.RAISED


def alive(pid: int) -> bool:
    for _ in range(50):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.02)
    return True
