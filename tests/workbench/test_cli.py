"""The command line from outside: what each of the plain commands prints, its exit code, its mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench import __main__ as shell
from workbench.command import Command, Key, Reply, Request, command_files, op_files

Toy = Callable[..., Path]
Capture = pytest.CaptureFixture[str]


def call(capsys: Capture, *words: str) -> tuple[int, str, str]:
    code = shell.run(words)
    out, err = capsys.readouterr()
    return code, out, err


def answer(capsys: Capture, *words: str) -> Any:
    code, out, err = call(capsys, *words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def mistake(capsys: Capture, *words: str) -> str:
    """The one line of a usage error."""
    code, out, err = call(capsys, *words)
    assert (code, out) == (2, "") and err.count("\n") == 1 and "Traceback" not in err
    assert json.loads(_json_of(capsys, *words)) == {"error": err.removeprefix("workbench: ").strip(), "code": 2}
    return err


def _json_of(capsys: Capture, *words: str) -> str:
    return call(capsys, *words, "--json")[1]


def test_help_lists_every_command(capsys: Capture) -> None:
    for words in ((), ("--help",)):
        code, out, _ = call(capsys, *words)
        assert code == 0 and "Examples:" in out
        assert all(f"\n  {name}" in out for name in command_files())


@pytest.mark.parametrize("name", command_files())
def test_each_command_explains_itself(capsys: Capture, name: str) -> None:
    command = shell.load_command(name)
    code, out, _ = call(capsys, name, "--help")
    assert code == 0 and command.name == name and command.summary in out
    assert command.examples and all(f"  {example}" in out for example in command.examples)
    assert all(f"workbench {name}" in example for example in command.examples)
    assert all(f"{key.name}=" in out and key.doc for key in command.keys)
    assert command.summary.endswith(".") and "--json" in out
    assert set(command.positional) <= {key.name for key in command.keys}


def test_version(capsys: Capture) -> None:
    code, out, _ = call(capsys, "--version")
    assert code == 0 and out == f"workbench {shell.version()}\n"


def test_mistakes_before_a_command(capsys: Capture) -> None:
    assert "there is no command 'op'; did you mean 'ops'?" in mistake(capsys, "op")
    assert "No such option" in mistake(capsys, "ops", "--jsno")
    assert "there is no op 'lightning_decod'; did you mean 'lightning_decode'?" in mistake(
        capsys, "ops", "op=lightning_decod"
    )
    assert "did you mean op=lightning_decode?" in mistake(capsys, "ops", "lightning_decode")


def test_ops(capsys: Capture) -> None:
    assert [row["op"] for row in answer(capsys, "ops")] == op_files()
    code, out, _ = call(capsys, "ops")
    assert code == 0 and all(name in out for name in op_files())


def test_ops_prints_a_contract(toy: Toy, capsys: Capture) -> None:
    toy("one")
    (page,) = answer(capsys, "ops", "op=doubling")
    assert page["arguments"][0] == {"name": "x", "type": "Float32[Tensor, 'n']"}
    assert page["arguments"][3] == {"name": "factor", "type": "int"}
    assert page["doc"] == "Write `x · weight · factor` to `out`."
    assert page["outputs"]["out"]["tolerance"] == "bitwise"
    assert page["variants"] == ["one"]
    assert [w["axes"]["n"] for w in page["workloads"]] == [3, 63, 64]
    (page,) = answer(capsys, "ops", "op=doubling", "n=64k")
    assert [(w["axes"]["n"], w["flops"]) for w in page["workloads"]] == [(65536, 131072.0)]
    out = call(capsys, "ops", "op=doubling")[1]
    for word in ("def doubling(", "n=", "plain, packed", "bitwise", "poisoned", "regimes: ordinary"):
        assert word in out
    assert "did you mean 'form'" in mistake(capsys, "ops", "op=doubling", "frm=plain")
    assert "no preset 'smoky'" in mistake(capsys, "ops", "op=doubling", "preset=smoky")


def test_every_contract_can_be_printed(capsys: Capture) -> None:
    assert [page["op"] for page in answer(capsys, "ops", "op=all")] == op_files()


def test_variants(toy: Toy, capsys: Capture, tmp_path: Path) -> None:
    toy("one")
    toy("bad", text="import nothing_of_ours\n")
    toy("small", declaration="supports=lambda w: None if w['n'] < 10 else f\"needs n<10, got {w['n']}\"")
    toy("gpu", declaration='runs_on=("cuda",), tunables={"block": (1, 2)}', keywords=", *, block=1")
    rows = {row["variant"]: row for row in answer(capsys, "variants", "op=doubling", "device=cpu")}
    assert rows["one"]["reason"] is None and rows["one"]["place"] == "cpu" and rows["one"]["doc"] == "Say one."
    assert rows["bad"]["reason"].startswith("needs the package 'nothing_of_ours'")
    assert rows["small"]["reason"] is None
    assert rows["gpu"]["reason"] == "runs on cuda, not on cpu" and rows["gpu"]["tunables"] == {"block": [1, 2]}
    rows = {row["variant"]: row for row in answer(capsys, "variants", "op=doubling", "device=cpu", "n=3,64")}
    assert rows["small"]["reason"] == "n=64 form=plain: needs n<10, got 64"
    code, out, _ = call(capsys, "variants", "op=doubling", "device=cpu")
    assert code == 0 and "refused: runs on cuda, not on cpu" in out and "block=1,2" in out
    assert "there is no such file" in mistake(capsys, "variants", "op=doubling", f"plugin={tmp_path}/x.py")


def test_square_brackets_are_shown_as_they_are(toy: Toy, capsys: Capture) -> None:
    toy("odd", text="raise ValueError('[bold]no[/bold] [gpu]')\n")
    assert "[bold]no[/bold] [gpu]" in call(capsys, "variants", "op=doubling")[1]


@pytest.mark.parametrize("kind", ["torch", "triton"])
@pytest.mark.parametrize("op", [*op_files(), "doubling"])
def test_new_fits_every_contract(toy: Toy, capsys: Capture, tmp_path: Path, op: str, kind: str) -> None:
    path = tmp_path / "plug" / "my_own.py"
    told = answer(capsys, "new", f"op={op}", "name=my_own", f"kind={kind}", f"path={path}")
    assert told["file"] == str(path) and told["next"][0].startswith(f"workbench check op={op} variant=my_own plugin=")
    from workbench.registry import find

    function = find(op, "my_own", [str(path)]).function
    import inspect

    names = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    with pytest.raises(NotImplementedError, match="my_own is not written yet"):
        function(**dict.fromkeys(names))
    ruff = [sys.executable, "-m", "ruff"]
    settings = ["--config", str(Path(__file__).parents[2] / "pyproject.toml")]
    for check in (["check"], ["format", "--check"]):
        done = subprocess.run([*ruff, *check, *settings, str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + path.read_text()


def test_new_in_the_folder(toy: Toy, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.registry.folders", lambda: [tmp_path / "variants"])
    (tmp_path / "pyproject.toml").touch()
    code, out, _ = call(capsys, "new", "op=doubling", "name=mine")
    path = tmp_path / "variants" / "doubling" / "mine.py"
    assert code == 0 and path.exists() and "workbench check op=doubling variant=mine" in out
    before = path.read_text()
    assert "already has a variant 'mine'" in mistake(capsys, "new", "op=doubling", "name=mine")
    assert "nothing is overwritten" in mistake(capsys, "new", "op=doubling", "name=other", f"path={path}")
    assert path.read_text() == before
    assert "lower-case Python name" in mistake(capsys, "new", "op=doubling", "name=My-Own")
    assert "needs name=" in mistake(capsys, "new", "op=doubling")
    assert "ends in .py" in mistake(capsys, "new", "op=doubling", "name=x", f"path={tmp_path}/x.txt")
    monkeypatch.setattr("workbench.registry.folders", lambda: [Path("/x/site-packages/variants")])
    assert "say path=FILE.py" in mistake(capsys, "new", "op=doubling", "name=x")


def test_new_from_another(toy: Toy, capsys: Capture, tmp_path: Path) -> None:
    toy("one", declaration='tunables={"block": (1, 2)}', keywords=", *, block=1")
    for number, source in enumerate(("one", "two")):
        toy("two")
        path = tmp_path / f"copy{number}.py"
        answer(capsys, "new", "op=doubling", f"name=copy{number}", f"like={source}", f"path={path}")
        text = path.read_text()
        assert f"def copy{number}(x, weight, out, factor" in text and '@variant(op="doubling"' in text
    assert "did you mean 'one'" in mistake(capsys, "new", "op=doubling", "name=x", "like=oen", f"path={tmp_path}/x.py")
    assert not (tmp_path / "x.py").exists()


def test_doctor(capsys: Capture) -> None:
    data = answer(capsys, "doctor", "measure=no")
    names = [finding["name"] for finding in data["findings"]]
    for name in ("python", "C++", "nvcc", "torch", "triton", "tilelang", "fla", "flashinfer"):
        assert name in names
    assert data["ceilings"] is None and data["ceilings_source"] == "not asked for: measure=no"
    assert all(row["reason"] for row in data["unavailable"])
    found = {finding["name"]: finding["found"] for finding in data["findings"]}
    assert found["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    for name, remedy in data["remedies"].items():
        assert found[name] is None and remedy
    code, out, _ = call(capsys, "doctor", "measure=no")
    assert code == 0 and "ceilings of this machine" in out
    assert "did you mean 'yes'" in mistake(capsys, "doctor", "measure=yse")


def test_doctor_measures(capsys: Capture) -> None:
    data = answer(capsys, "doctor", "seconds=0.2")
    assert data["ceilings_source"] == "measured now"
    assert data["ceilings"]["read_bytes_per_s"] > 0 and data["ceilings"]["flops_per_s"]["bf16"] > 0


def test_faults_are_one_line_with_a_hint(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(request: Request) -> Reply:
        raise KeyError("deep\ndown")

    command = Command("ops", "Ops.", (Key("op", str, "op"),), run, ("workbench ops",))
    monkeypatch.setattr(shell, "load_command", lambda name: command)
    code, out, err = call(capsys, "ops")
    assert (code, out) == (shell.FAULT, "") and err.count("\n") == 1
    assert "fault in ops: KeyError" in err and "--traceback" in err
    code, _, err = call(capsys, "ops", "--traceback")
    assert code == shell.FAULT and "Traceback" in err and "in run" in err


def test_reply_codes_and_interruption(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    replies: dict[str, Any] = {"fail": Reply({"x": float("nan"), "p": Path("/a")}, ["no"], 1)}

    def run(request: Request) -> Reply:
        if request["op"] == "stop":
            raise KeyboardInterrupt
        return replies[request["op"]]

    command = Command("ops", "Ops.", (Key("op", str, "op"),), run, ("workbench ops",))
    monkeypatch.setattr(shell, "load_command", lambda name: command)
    assert call(capsys, "ops", "op=fail") == (1, "no\n", "")
    code, out, _ = call(capsys, "ops", "op=fail", "--json")
    assert code == 1 and json.loads(out) == {"x": "nan", "p": "/a"}
    assert call(capsys, "ops", "op=stop") == (130, "", "workbench: interrupted\n")


def start(*words: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "workbench", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def test_as_a_process() -> None:
    with start("ops", "op=nothing") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "") and err.startswith("workbench: op=nothing: there is no op")


@pytest.mark.parametrize("after_s", [0.3, 1.0, 6.0])
def test_control_c_ends_with_130(after_s: float) -> None:
    """While it starts, imports, or waits for a worker."""
    with start("doctor", "measure=yes", "seconds=30") as process:
        time.sleep(after_s)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    if after_s <= 1 and process.returncode == -signal.SIGINT:
        return  # so early that Python itself was still starting
    assert process.returncode == 130 and "Traceback" not in err and out == ""


def test_a_reader_that_leaves() -> None:
    with start("ops", "op=all") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
        process.wait(60)
    assert process.returncode == 0 and "BrokenPipe" not in err
