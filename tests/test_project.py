"""What a stranger meets first: the README's variant, the package's metadata, the files that set up and run."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def readme_variant() -> str:
    (found,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return found


@pytest.mark.parametrize(("old", "new", "code"), [("1e-6", "1e-6", 0), ("1e-6", "1e-5", 1)])
def test_the_readmes_variant(tmp_path: Path, old: str, new: str, code: int) -> None:
    assert len([line for line in readme_variant().splitlines() if line.strip()]) <= 10
    (tmp_path / "mine.py").write_text(readme_variant().replace(old, new))
    words = ["check", "op=residual_rmsnorm", "variant=mine", f"plugin={tmp_path}/mine.py"]
    words += ["tokens=3", "hidden=96", "seeds=1", "device=cpu", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "workbench", *words], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    (row,) = json.loads(done.stdout)
    assert row["status"] == ("passed" if code == 0 else "failed"), row


def test_readme_names_every_command_and_no_other() -> None:
    text = (ROOT / "README.md").read_text()
    commands = {path.stem for path in (ROOT / "workbench" / "cli").glob("*.py") if not path.stem.startswith("_")}
    assert {name for name in commands if f"`{name}`" not in text} == set()
    assert set(re.findall(r"(?:`|bin/|^)workbench ([a-z]+) ", text, re.MULTILINE)) <= commands


def test_metadata() -> None:
    metadata = importlib.metadata.metadata("sala-workbench")
    assert set(metadata.get_all("Provides-Extra") or ()) == {"gpu", "cpu", "dev"}
    assert metadata["License-Expression"] == "Apache-2.0"
    requires = importlib.metadata.requires("sala-workbench") or []
    base = [line for line in requires if "extra ==" not in line]
    assert any(line.startswith("torch") for line in base)
    assert not any(word in line for line in base for word in ("nvidia", "cuda", "triton"))
    gpu = {re.split(r"[^\w-]", line)[0] for line in requires if 'extra == "gpu"' in line}
    assert gpu == {"triton", "tilelang", "flashinfer-python", "flash-linear-attention", "nvidia-ml-py"}
    (script,) = [p for p in importlib.metadata.entry_points(group="console_scripts") if p.name == "workbench"]
    assert script.value == "workbench.__main__:main"


def test_licence() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text() and "Version 2.0" in (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("name", ["install.sh", ".ci/run"])
def test_scripts_are_bash(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK)
    assert subprocess.run(["bash", "-n", str(ROOT / name)], check=False).returncode == 0


def test_install_refuses_a_wrong_python(tmp_path: Path) -> None:
    (tmp_path / "install.sh").write_text((ROOT / "install.sh").read_text())
    done = subprocess.run(
        ["bash", str(tmp_path / "install.sh"), "cpu"],
        env={**os.environ, "PYTHON": "no-such-python"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and done.stderr == "PYTHON=no-such-python is no Python from 3.10 to 3.13\n"
    assert not (tmp_path / ".venv").exists()


def test_make_knows_its_goals() -> None:
    for goal in ("bench", "test", "benchmark", "format"):
        done = subprocess.run(["make", "-n", goal], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert (
        "workbench bench op=linear batch=1"
        in subprocess.run(
            ["make", "-n", "bench", "OP=linear", "ARGS=batch=1"], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout
    )


def test_no_file_names_the_folder_it_was_written_in() -> None:
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    for name in files:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".sh", ".yaml"):
            assert f"{ROOT}/" not in path.read_text(), name
