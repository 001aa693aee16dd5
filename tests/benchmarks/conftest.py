"""Races under pytest-benchmark: `make benchmark OP=lightning_decode ARGS='--preset=decode --benchmark-compare'`.

A race is run once, by `workbench bench`: gated, interleaved, kept in the store. Each of its rivals is then a
benchmark whose rounds are the race's, so that pytest-benchmark's tables, saving and comparing work on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from workbench.__main__ import load_command
from workbench.command import ops, parse_words, variant_files
from workbench.contract import Workload, contract
from workbench.record import Measurement
from workbench.store import Store


class Races:
    """The races of this session, each run when it is first asked for."""

    def __init__(self, *settings: str) -> None:
        """`settings` are further words for `workbench bench`."""
        self.settings = settings
        self.rows: dict[Workload, dict[str, Measurement]] = {}

    def of(self, workload: Workload) -> dict[str, Measurement]:
        """What the race of all variants on `workload` measured, by variant."""
        if workload not in self.rows:
            sizes = [f"{axis}={value}" for axis, value in workload.axes]
            bench = load_command("bench")
            reply = bench.run(parse_words(bench, [f"op={workload.op}", *sizes, *self.settings], json=True))
            if reply.code == 130:
                raise KeyboardInterrupt
            with Store(reply.data["store"], create=False) as store:
                rows = [store.get(row["id"])[1].measurement for row in reply.data["results"][0]["rows"]]
            self.rows[workload] = {row.label: row for row in rows}
        return self.rows[workload]


RACES = pytest.StashKey[Races]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options that say what to race."""
    group = parser.getgroup("workbench")
    group.addoption("--op", default="lightning_decode", help="ops to race: a,b or all")
    group.addoption("--preset", help="workloads (default: those of `workbench bench`)")
    group.addoption("--budget", help="longest time of a race, as 30s")
    group.addoption("--store", help="database (default: $WORKBENCH_STORE or .workbench/store.db)")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the races; nothing runs yet."""
    given = {name: config.getoption(f"--{name}") for name in ("budget", "store")}
    config.stash[RACES] = Races(*(f"{name}={value}" for name, value in given.items() if value))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A case for every rival on every workload."""
    if not {"workload", "rival"} <= set(metafunc.fixturenames):
        return
    cases = []
    for op in ops(metafunc.config.getoption("--op")):
        for workload in _workloads(op, metafunc.config.getoption("--preset")):
            label = workload.label.replace("=", "").replace(" ", "_")  # as -k can take it
            cases += [pytest.param(workload, name, id=f"{op}-{label}-{name}") for name in variant_files(op)]
    metafunc.parametrize(("workload", "rival"), cases)


def _workloads(op: str, preset: str | None) -> tuple[Workload, ...]:
    import torch

    presets = contract(op).presets
    usual = ("decode", "prefill", "smoke") if torch.cuda.is_available() else ("smoke",)
    return presets[preset or next(name for name in (*usual, *presets) if name in presets)]


@pytest.fixture
def race(request: pytest.FixtureRequest) -> Callable[[Workload], dict[str, Measurement]]:
    """The outcome of the race on a workload, by variant."""
    return request.config.stash[RACES].of


@pytest.hookimpl(hookwrapper=True)
def pytest_benchmark_generate_machine_info(config: pytest.Config) -> Iterator[None]:
    """Let what pytest-benchmark saves of the machine carry the workbench's fingerprint."""
    outcome: Any = yield
    rows = [row for rows in config.stash[RACES].rows.values() for row in rows.values()]
    if rows:
        outcome.get_result()["workbench"] = {"fingerprint_key": rows[0].fingerprint_key, **rows[0].fingerprint}
