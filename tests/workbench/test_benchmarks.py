"""`make benchmark`: what a race measured arrives in pytest-benchmark's records, and failures stay failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

STAND_IN = '''"""Stands in for the races: measurements made up, one of each kind."""

from workbench.command import variant_files
from workbench.record import Measurement, Mode, Status


def pytest_collection_finish(session):
    for plugin in session.config.pluginmanager.get_plugins():
        if hasattr(plugin, "Races"):
            plugin.Races.of = of


def of(self, workload):
    names = variant_files(workload.op)
    made = [measured(workload, names[0])]
    made += [ended(workload, name, Status.REFUSED) for name in names[1:2]]
    made += [ended(workload, name, Status.FAILED_GATE) for name in names[2:]]
    self.rows[workload] = {row.label: row for row in made}
    return self.rows[workload]


def common(workload, name):
    return dict(
        op=workload.op, variant=name, label=name, origin="variants", axes=dict(workload.axes), preset="smoke",
        parameters={"block": 2}, source_hash="s", protocol=1, fingerprint={"cpu": "made up"}, fingerprint_key="key",
    )


def measured(workload, name):
    return Measurement(
        **common(workload, name), status=Status.OK, reason=None, gate="g1", gate_passed=True, mode=Mode.CPU,
        latency_us=20.0, latency_low_us=10.0, latency_high_us=30.0, limit_us=5.0, share_of_limit=0.25,
        rounds_us=((9.0, 10.0, 11.0), (20.0,), (30.0,)), seeds=(1, 2, 3),
    )


def ended(workload, name, status):
    return Measurement(**common(workload, name), status=status, reason="as planned")
'''


def test_the_race_arrives(tmp_path: Path) -> None:
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    command = [sys.executable, "-m", "pytest", "tests/benchmarks", "--op=residual_rmsnorm", "-p", "stand_in"]
    command += ["-o", "python_files=bench_*.py", "-o", "python_functions=bench_*", "--preset=smoke"]
    command += ["--benchmark-autosave", f"--benchmark-storage={tmp_path}", "-p", "no:cacheprovider", "-p", "no:xdist"]
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # xdist disables it
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**outer, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert list(tmp_path.glob("*/*.json")), done.stdout + done.stderr
    (saved,) = tmp_path.glob("*/*.json")
    record = json.loads(saved.read_text())
    assert done.returncode == 1 and "failed_gate: as planned" in done.stdout and "skipped" in done.stdout
    assert record["machine_info"]["workbench"] == {"fingerprint_key": "key", "cpu": "made up"}
    first = record["benchmarks"][0]
    assert first["group"].startswith("residual_rmsnorm tokens=")
    assert first["stats"]["rounds"] == 3
    assert [round(first["stats"][name] * 1e6, 6) for name in ("min", "median", "max")] == [10.0, 20.0, 30.0]
    for name, value in {"share_of_limit": 0.25, "fingerprint_key": "key", "limit_us": 5.0, "mode": "cpu"}.items():
        assert first["extra_info"][name] == value
    assert len({row["group"] for row in record["benchmarks"]}) == len(record["benchmarks"])
