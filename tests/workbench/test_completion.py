"""Shell completion: the answers, and the scripts in the shells that are installed here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from workbench import __main__ as shell
from workbench.command import Command, Key, Reply, command_files, flag, op_files, ops, words
from workbench.completion import SCRIPTS, answers

RACE = Command(
    "race",
    "Race.",
    (
        Key("op", ops, "ops"),
        Key("variant", words, "names"),
        Key("cold", flag, "cold"),
        Key("plugin", words, "files"),
        Key("shell", str, "shell", complete=lambda: ("bash", "zsh")),
    ),
    lambda request: Reply({}, []),
    (),
    axes=True,
)


def test_keys(toy: Callable[..., Path]) -> None:
    assert answers(RACE, [], "") == ["op=", "variant=", "cold=", "plugin=", "shell=", "preset="]
    assert answers(RACE, ["op=doubling"], "") == ["variant=", "cold=", "plugin=", "shell=", "preset=", "n=", "form="]
    assert answers(RACE, ["op=doubling"], "f") == ["form="]
    assert answers(RACE, [], "x") == []


def test_values(toy: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy("eager")
    toy("triton_fused")
    assert answers(RACE, [], "op=lightning_d") == ["op=lightning_decode"]
    assert answers(RACE, [], "op=lightning_decode,doub") == ["op=lightning_decode,doubling"]
    assert answers(RACE, ["op=doubling"], "variant=") == ["variant=eager", "variant=triton_fused"]
    assert answers(RACE, ["op=doubling"], "variant=eager,t") == ["variant=eager,triton_fused"]
    assert answers(RACE, ["op=doubling"], "form=p") == ["form=plain", "form=packed"]
    assert answers(RACE, [], "preset=s") == ["preset=smoke"]
    assert answers(RACE, [], "cold=") == ["cold=yes", "cold=no"]
    assert answers(RACE, [], "shell=z") == ["shell=zsh"]
    assert answers(RACE, [], "nothing=z") == []
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "kernel.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert answers(RACE, [], "plugin=m") == ["plugin=my/"]
    assert answers(RACE, [], "plugin=my/k") == ["plugin=my/kernel.py"]
    assert answers(RACE, [], "plugin=nowhere/k") == []


def test_positions() -> None:
    show = Command(
        "show", "Show.", (Key("id", str, "id", complete=lambda: ("m1", "m2")),), RACE.run, (), positional=("id",)
    )
    assert answers(show, [], "m") == ["m1", "m2"]
    assert answers(show, ["m1"], "m") == []


def asked(line: str, name: str = "bash") -> list[str]:
    """What a shell gets for the line up to the cursor."""
    environment = {**os.environ, "COMP_WORDS": line, "_WORKBENCH_COMPLETE": f"{name}_complete"}
    done = subprocess.run(
        [sys.executable, "-m", "workbench"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_the_protocol() -> None:
    assert asked("workbench ") == command_files()
    assert asked("workbench var", "zsh") == ["variants"]
    assert asked("workbench variants o", "fish") == ["op="]
    assert asked("workbench variants --j") == ["--json"]
    assert asked("workbench variants op=") == [f"op={name}" for name in op_files()]


@pytest.mark.parametrize("name", list(SCRIPTS))
def test_scripts(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert shell.run(["completion", f"shell={name}"]) == 0
    script = capsys.readouterr().out
    assert script.rstrip() == SCRIPTS[name].rstrip()
    if shutil.which(name):
        assert subprocess.run([name, "-n"], input=script, text=True, check=False).returncode == 0


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("workbench compl", ["completion"]),
        ("workbench variants op=lightning_d", ["lightning_decode"]),
        ("workbench completion shell=", ["bash", "zsh", "fish"]),
    ],
)
def test_in_bash(tmp_path: Path, line: str, expected: list[str]) -> None:
    (tmp_path / "workbench").write_text(f'#!/bin/sh\nexec {sys.executable} -m workbench "$@"\n')
    (tmp_path / "workbench").chmod(0o755)
    typed = f"COMP_LINE='{line}'\nCOMP_POINT=${{#COMP_LINE}}\n_workbench_completion workbench 2>/dev/null\n"
    script = SCRIPTS["bash"] + typed + 'printf "%s\\n" "${COMPREPLY[@]}"\n'
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == expected
