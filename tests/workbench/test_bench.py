"""The commands bench, show, why, compare and history, as a user runs them: killed, interrupted, gone on with."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import pytest

from workbench import fingerprint, tables
from workbench.__main__ import run
from workbench.record import Measurement, Mode, Status, Verdict
from workbench.store import VARIABLE, Store
from workbench.sweep import Outcome

PLANTED = str(Path(__file__).with_name("planted.py"))
LINE = [
    "op=residual_rmsnorm",
    "variant=good",
    f"plugin={PLANTED}",
    "tokens=1,2,3",
    "hidden=64",
    "budget=1s",
    "device=cpu",
]


def bench(store: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, VARIABLE: str(store), "PYTHONPATH": str(fingerprint.ROOT)}
    return subprocess.Popen([sys.executable, "-m", "workbench", "bench", *LINE], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env=environment)  # fmt: skip


def until(stream: IO[str] | None, pattern: str) -> str:
    assert stream is not None
    said = ""
    for line in stream:
        said += line
        if re.search(pattern, line):
            return said
    raise AssertionError(f"never said {pattern!r}: {said}")


def test_killed_then_interrupted_then_finished(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with Store(str(path)) as store:
        store.add_ceilings(
            fingerprint.key(fingerprint.machine("cpu")),
            {"device": "cpu", "read_bytes_per_s": 1e15, "copy_bytes_per_s": 1e15, "flops_per_s": {}},
        )
    first = bench(path)
    until(first.stderr, r"tokens=1 hidden=64: 1 raced")
    until(first.stderr, r"tokens=2 hidden=64: gating")
    first.kill()
    first.wait()
    with Store(str(path)) as store:  # sound, and what was finished is there
        assert len(store.measurements(run="r1")) == 1
        assert store.get("r1")[1]["status"] == "running"

    second = bench(path)
    said = until(second.stderr, r"tokens=2 hidden=64: 1 raced")
    assert "tokens=1 hidden=64: kept from the interrupted run r1" in said
    until(second.stderr, r"tokens=3 hidden=64: gating")
    asked = time.monotonic()
    second.send_signal(signal.SIGINT)
    out, _ = second.communicate(timeout=60)
    assert second.returncode == 130
    assert time.monotonic() - asked < 20  # two seconds on a quiet machine; this only tells an end from a hang
    assert "Go on with the same line: workbench bench op=residual_rmsnorm" in " ".join(out.split())
    with Store(str(path)) as store:
        assert len(store.measurements(run="r1")) == 2
        assert store.get("r1")[1]["status"] == "interrupted"

    third = bench(path)
    out, err = third.communicate(timeout=200)
    assert third.returncode == 0, err
    assert err.count("kept from the interrupted run r1") >= 2
    with Store(str(path)) as store:
        assert len(store.measurements(run="r1")) == 3
        assert [row["status"] for row in store.runs()] == ["finished"]
    assert out.count("good") >= 3 and "tokens=3" in out


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of two runs on one machine, with a third on another."""
    path = tmp_path / "store.db"
    monkeypatch.setenv(VARIABLE, str(path))
    machine = {"gpu": "H200", "driver": "1.2", "packages": {"torch": "2.13", "triton": None}, "device": "cuda",
               "arch": "sm_90", "cuda": "13.0", "protocol": 1}  # fmt: skip
    with Store(str(path)) as store:
        for revision, scale, facts in (
            ("aaa", 1.0, machine),
            ("bbb", 0.8, machine),
            ("ccc", 0.5, {**machine, "driver": "9"}),
        ):
            key = fingerprint.key(facts)
            number = store.start_run("workbench bench op=linear plugin=a.py", revision, facts, key, "s", revision)
            gate = store.add_gate(number, "residual_rmsnorm", "mine", "tokens=8 hidden=4k", "00", Status.OK, None, {})
            bad = {"failure": {"workload": "tokens=63 hidden=4k", "regime": "ties", "seed": 3, "kind": "wrong values"}}
            store.add_gate(
                number,
                "residual_rmsnorm",
                "wrong:block=8#2",
                "tokens=8 hidden=4k",
                "00",
                Status.FAILED_GATE,
                "off",
                bad,
            )
            store.add_measurements(number, rows(scale, facts, key, gate), revision=revision)
            store.end_run(number, "finished")
    return path


def rows(scale: float, facts: dict[str, Any], key: str, gate: str) -> list[Measurement]:
    common: dict[str, Any] = {
        "op": "residual_rmsnorm", "origin": "variants", "axes": {"tokens": 8, "hidden": 4096}, "preset": "custom",
        "source_hash": "00", "protocol": 1, "fingerprint": facts, "fingerprint_key": key, "seeds": tuple(range(8)),
        "conditions": ({"sm_mhz": 1900, "throttled": []},) * 8, "mode": Mode.GRAPH,
    }  # fmt: skip
    base = [10 * scale * (1 + 0.001 * i) for i in range(8)]
    best = Measurement(
        **common, variant="mine", label="mine", parameters={"block": 64}, status=Status.OK, reason=None, gate=gate,
        gate_passed=True, latency_us=10.035 * scale, latency_low_us=10.0 * scale, latency_high_us=10.07 * scale,
        limit_us=4.0 * scale, share_of_limit=0.4, rank=1, verdict=Verdict.FASTER, versus="b", ratio=0.5, ratio_low=0.49,
        ratio_high=0.51, rounds_us=tuple((x,) for x in base), sets=64,
    )  # fmt: skip
    lost = Measurement(**common, variant="b", label="b", parameters={}, status=Status.CRASHED, reason="it died")
    return [best, lost]


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_show(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "show", "m1")
    assert found["repeat"] == (
        "workbench bench op=residual_rmsnorm variant=mine:block=64 tokens=8 hidden=4k device=cuda"
    )
    assert found["rounds_us"][0] == [10.0] and found["fingerprint"]["driver"] == "1.2" and found["revision"] == "aaa"
    assert answer(capsys, "show", "2")["reason"] == "it died"
    failed = answer(capsys, "show", "g2")
    assert failed["repeat"] == (
        "workbench check op=residual_rmsnorm variant=wrong tokens=63 hidden=4k regime=ties seed=3 block=8 plugin=a.py"
    )
    assert answer(capsys, "show", "r2")["measurements"] == ["m3", "m4"]
    assert run(["show", "m1"]) == 0
    said = capsys.readouterr().out
    assert "repeat: workbench bench" in said and "machine.driver: 1.2" in said and "seed=7 sm_mhz=1900" in said


def test_why(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = answer(capsys, "why", "m1", "m3")
    assert same["comparable"] and [found["what"] for found in same["differences"]] == ["commit"]
    assert same["comparison"]["verdict"] == "SLOWER"
    other = answer(capsys, "why", "m1", "m5")
    assert not other["comparable"] and other["comparison"] is None
    assert other["differences"][0] == {
        "group": "machine",
        "what": "driver",
        "ours": "1.2",
        "theirs": "9",
        "decides": True,
    }
    assert run(["why", "m1", "r1"]) == 2
    assert run(["why", "m1"]) == 2


def test_compare(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("r1", "r2"), ("aaa", "bbb")):
        (row,) = answer(capsys, "compare", *words)["rows"]
        assert (row["label"], row["comparison"]["verdict"]) == ("mine", "FASTER")
        assert row["comparison"]["ratio"]["value"] == pytest.approx(0.8)
    (row,) = answer(capsys, "compare", "r1", "r3")["rows"]
    assert row["not_comparable"] == ["machine (driver)"]
    assert run(["compare", "r1", "zzz"]) == 2
    assert "neither a run (r3) nor a commit" in capsys.readouterr().err


def test_history(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "history", "op=residual_rmsnorm")
    assert [(row["commit"], row["best"]) for row in found] == [("aaa", True), ("bbb", True), ("ccc", True)]
    assert len({row["machine"] for row in found}) == 2
    assert run(["history", "op=residual_rmsnorm", "tokens=3"]) == 2
    assert "no figures of residual_rmsnorm on the workloads asked for" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench"], "needs op="),
        (["bench", "op=residual_rmsnrm"], "did you mean 'residual_rmsnorm'"),
        (["bench", "op=residual_rmsnorm", "token=3"], "tokens"),
        (["bench", "op=residual_rmsnorm", "device=gpu"], "there are: cuda, cpu"),
        (["bench", "op=residual_rmsnorm", "device=cpu:3"], "write it as cuda, cuda:1 or cpu"),
        (["bench", "op=residual_rmsnorm", "seeds=0"], "from 1 to 64k"),
        (["bench", "op=residual_rmsnorm", "store=/dev/null/x.db"], "name another with store=PATH"),
        (["bench", "op=residual_rmsnorm", "budget=fast"], "90s"),
        (["show", "m1", "store=/nowhere/x.db"], "there is no store"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "store.db"))
    assert run(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_wrong_variants_and_parameters_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "store.db"))
    from workbench.cli.bench import _setting

    assert _setting("good", "block=2", {"block": ["1", "2"]}) == ("block", "2")
    for text, said in (("block", "name=value"), ("blok=2", "did you mean 'block'"), ("block=9", "there are: 1, 2")):
        with pytest.raises(Exception, match=said):
            _setting("good", text, {"block": ["1", "2"]})
    assert run(["bench", "op=residual_rmsnorm", "variant=eagr", "device=cpu"]) == 2
    assert "did you mean 'eager'" in capsys.readouterr().err


def test_a_verdict_says_how_little_it_rests_on() -> None:
    (best, _) = rows(1.0, {}, "k", "g1")
    few = dataclasses.replace(best, verdict=Verdict.UNDECIDED, rounds_us=((10.0,), (10.07,)), seeds=(1, 2))
    assert tables.verdict(few).plain == "UNDECIDED against b 0.5× [0.49, 0.51], 2 rounds only"
    assert tables.verdict(dataclasses.replace(best, verdict=Verdict.UNDECIDED)).plain.endswith("[0.49, 0.51]")
    assert [tables.share(x) for x in (None, 0.0001, 0.5)] == ["–", "<1%", "50%"]


def test_the_footer_claims_nothing_where_nothing_was_raced() -> None:
    outcome = Outcome("r1", [], {"protocol": 2, "cpu": "a processor", "cores": 2}, None, False)
    assert tables.footer(outcome, "here")[1:] == [
        "run r1 in here: nothing was raced; `workbench show ID` tells all of a row"
    ]
