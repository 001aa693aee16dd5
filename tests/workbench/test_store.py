"""Records that refuse nonsense, and the store that keeps them."""

from __future__ import annotations

import dataclasses
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import UsageError
from workbench.record import Measurement, Mode, Status, Verdict
from workbench.store import SCHEMA, VARIABLE, Store, place

GOOD: dict[str, Any] = {
    "op": "residual_rmsnorm",
    "variant": "eager",
    "label": "eager",
    "origin": "variants",
    "axes": {"tokens": 8, "hidden": 65536},
    "preset": "custom",
    "parameters": {"num_warps": 4},
    "source_hash": "0123",
    "status": Status.OK,
    "reason": None,
    "protocol": 1,
    "fingerprint": {"gpu": None},
    "fingerprint_key": "k",
    "gate": "g1",
    "gate_passed": True,
    "mode": Mode.CPU,
    "latency_us": 2.0,
    "latency_low_us": 1.5,
    "latency_high_us": 2.5,
    "limit_us": 1.0,
    "share_of_limit": 0.5,
    "rank": 1,
    "verdict": Verdict.FASTER,
    "versus": "other",
    "ratio": 0.5,
    "ratio_low": 0.4,
    "ratio_high": 0.6,
    "rounds_us": ((1.5, 2.0), (2.5,)),
    "seeds": (11, 12),
    "conditions": ({"load": 0.5}, {}),
}


def record(**changes: Any) -> Measurement:
    return Measurement(**{**GOOD, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gate_passed": False}, "needs a passed gate"),
        ({"gate": None}, "needs a passed gate"),
        ({"status": Status.CRASHED}, "needs a reason"),
        ({"status": Status.CRASHED, "reason": "gone"}, "can't carry a latency"),
        ({"latency_us": None, "latency_low_us": None, "latency_high_us": None, "verdict": None}, "needs a latency"),
        ({"latency_us": -1.0}, "is no time"),
        ({"latency_us": float("nan")}, "is no time"),
        ({"warm_us": 0.0}, "is no time"),
        ({"launch_us": float("inf")}, "is no time"),
        ({"latency_us": 3.0}, "outside its interval"),
        ({"latency_low_us": None}, "half an interval"),
        ({"ratio": 0.7}, "outside its interval"),
        ({"limit_us": None}, "needs a limit"),
        ({"mode": None}, "samples need a mode"),
    ],
)
def test_nonsense_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        record(**changes)


def test_record_is_frozen_and_comes_back_whole() -> None:
    made = record()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.latency_us = 1.0  # type: ignore[misc]
    assert Measurement.from_json(made.to_json()) == made
    assert made.workload == "tokens=8 hidden=64k"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "a" / "store.db"))


def start(store: Store, request: str = "q") -> str:
    return store.start_run("workbench bench", request, {"gpu": None}, "k", "s", "abc")


def test_round_trip(store: Store) -> None:
    run = start(store)
    gate = store.add_gate(run, "residual_rmsnorm", "eager", "tokens=8", "0123", Status.OK, None, {"passed": True})
    ids = store.add_measurements(run, [record(gate=gate), record(label="b")], revision="abc")
    word, row = store.get(ids[0])
    assert (word, row.measurement, row["run"], row["revision"]) == ("measurement", record(gate=gate), run, "abc")
    assert store.get(ids[0][1:])[1]["id"] == ids[0]
    assert store.get(gate)[1]["passed"] and store.get(run)[1]["status"] == "running"
    assert [found["id"] for found in store.measurements(run=run)] == ids
    assert store.measurements(op="linear") == []
    assert [found["id"] for found in store.gates(run)] == [gate]


def test_rows_of_a_race_come_all_or_none(store: Store) -> None:
    run = start(store)

    def broken() -> Any:
        yield record()
        raise RuntimeError("killed here")

    with pytest.raises(RuntimeError):
        store.add_measurements(run, broken(), revision=None)
    assert store.measurements(run=run) == []


def test_unfinished_run_is_found_once(store: Store) -> None:
    run = start(store)
    found = store.unfinished_run("q", "k", "s")
    assert found is not None and found["id"] == run
    assert store.unfinished_run("other", "k", "s") is None
    assert store.unfinished_run("q", "other machine", "s") is None
    assert store.unfinished_run("q", "k", "other sources") is None
    store.end_run(run, "finished")
    assert store.unfinished_run("q", "k", "s") is None


def test_stopped_races_are_set_apart(store: Store) -> None:
    run = start(store)
    cut = record(status=Status.INTERRUPTED, reason="stopped", latency_us=None, latency_low_us=None,
                 latency_high_us=None, verdict=None)  # fmt: skip
    store.add_measurements(run, [cut], revision=None, final=False)
    assert store.measurements(run=run) == []
    assert len(store.measurements(run=run, final=None)) == 1


def test_ceilings(store: Store) -> None:
    assert store.ceilings("k") is None
    store.add_ceilings("k", {"read_bytes_per_s": 1.0})
    store.add_ceilings("k", {"read_bytes_per_s": 2.0})
    assert store.ceilings("k") == {"read_bytes_per_s": 2.0}


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert place(None) == "sqlite:///.workbench/store.db"
    monkeypatch.setenv(VARIABLE, "/srv/x.db")
    assert place(None) == "sqlite:////srv/x.db"
    assert place("postgresql://host/db") == "postgresql://host/db"


def test_what_cannot_be_used_is_said(tmp_path: Path, store: Store) -> None:
    (tmp_path / "text.db").write_text("no database, but long enough to look like one" * 50)
    with pytest.raises(UsageError, match="store=.*can't be used.*store=PATH"):
        Store(str(tmp_path / "text.db"))
    with pytest.raises(UsageError, match="can't be used"):
        Store(str(tmp_path / "text.db" / "below.db"))
    with pytest.raises(UsageError, match="there is no store"):
        Store(str(tmp_path / "none.db"), create=False)
    with pytest.raises(UsageError, match=r"no measurement m5; it holds no measurement yet"):
        store.get("m5")
    with pytest.raises(UsageError, match="is no id"):
        store.get("abc")


def test_a_file_that_is_damaged_inside_is_told(tmp_path: Path) -> None:
    path = tmp_path / "damaged.db"
    with Store(str(path)) as store:
        store.start_run("bench", "r", {}, "k", "s", None)
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))
    with pytest.raises(UsageError, match=r"damaged.db can't be used: .*; name another with store=PATH"):  # noqa: SIM117
        with Store(str(path)) as store:
            store.runs()


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    Store(str(path)).close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE workbench SET schema = {SCHEMA + 1}")
    with pytest.raises(UsageError, match=f"has schema {SCHEMA + 1}, this workbench writes {SCHEMA}"):
        Store(str(path))


def test_a_missing_driver_is_told_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(UsageError, match=r"pip install 'psycopg\[binary\]', or name another"):
        Store("postgresql://me:secret@localhost/db")


def test_password_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        Store("postgresql+nodriver://me:secret@localhost/db")
    assert "secret" not in str(raised.value)
