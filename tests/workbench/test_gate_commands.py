"""The commands `check` and `selftest`, as a user types them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from workbench import __main__ as shell
from workbench.gate.selftest import Outcome

Call = Callable[..., "Done"]

PLUGIN = '''"""Variants for a test of the gate."""

from torch import Tensor

from workbench.variant import variant


@variant(op="residual_rmsnorm")
def lazy(branch: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: float) -> None:
    """Writes zeros."""
    out.zero_()
'''


@dataclasses.dataclass
class Done:
    """What a command answered."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def workbench(capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls a command in this process."""

    def call(*words: str) -> Done:
        code = shell.run(words)
        return Done(code, *capsys.readouterr())

    return call


def test_check_passes_a_right_variant(workbench: Call) -> None:
    done = workbench("check", "op=residual_rmsnorm", "variant=eager", "tokens=3", "hidden=32", "seed=1", "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["variant"], row["status"], row["failure"]) == ("eager", "passed", None)
    assert row["margin"] <= 1


def test_check_tells_what_is_wrong_and_the_line_it_tells_repeats_it(workbench: Call, tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(PLUGIN)
    words = ["check", "op=residual_rmsnorm", "variant=lazy", f"plugin={plugin}", "tokens=3", "hidden=32", "seeds=1"]
    done = workbench(*words)
    assert done.returncode == 1, done.stderr
    assert "failed" in done.stdout
    assert "wrong values in" in done.stdout
    # the line may be wrapped; what it says is one command
    line = " ".join(done.stdout.split("to repeat it: ")[1].split())
    assert line.startswith("workbench check op=residual_rmsnorm variant=lazy tokens=3 hidden=32 regime=ordinary seed=0")
    again = workbench(*line.split("workbench ")[1].split(), "--json")
    assert again.returncode == 1
    (row,) = json.loads(again.stdout)
    assert row["failure"]["kind"] == "wrong values" and row["failure"]["seed"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("check", "op=residual_rmsnorm", "regime=ordinry"), "did you mean 'ordinary'"),
        (("check", "op=residual_rmsnorm", "variant=eagr"), "did you mean 'eager'"),
        (("check", "op=residual_rmsnorm", "seeds=0"), "seeds=0: must be a whole number from 1 to 64k"),
        (("selftest", "op=residual_rmsnorm", "mutant=weight_mising"), "did you mean 'weight_missing'"),
        (("selftest",), "selftest needs op="),
    ],
)
def test_mistakes_are_one_line_that_names_the_right_word(workbench: Call, words: tuple[str, ...], said: str) -> None:
    done = workbench(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_selftest_lists_mutants_and_its_kill_rate(workbench: Call) -> None:
    done = workbench("selftest", "op=residual_rmsnorm", "mutant=eps_missing,weight_missing,one_rounding", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(done.stdout)
    assert data["ok"] and data["kill_rate"] == 1
    found = {row["mutant"]: row for row in data["mutants"]}
    assert found["eps_missing"]["killed"] and found["eps_missing"]["by"]["kind"] == "wrong values"
    assert all(row["killed"] for row in data["mutants"])
    assert [(row["allowed"], row["killed"]) for row in data["allowed"]] == [("one_rounding", False)]
    assert all(row["ok"] for group in ("law", "impostors", "faults") for row in data[group])


def test_check_takes_tunables_of_those_that_have_them(workbench: Call) -> None:
    plugin = Path(__file__).with_name("planted.py")
    words = ["check", "op=residual_rmsnorm", f"plugin={plugin}", "tokens=3", "hidden=32", "seed=1", "regime=ordinary"]
    done = workbench(*words, "block=2", "--json")
    assert done.returncode == 0, done.stderr
    assert [(row["variant"], row["status"]) for row in json.loads(done.stdout)] == [("good", "passed")]
    done = workbench(*words, "block=3")
    assert done.returncode == 2 and "good:block=3: there are: 1, 2" in done.stderr
    done = workbench(*words, "block=2", "variant=slow")
    assert done.returncode == 2 and "'slow' of residual_rmsnorm has no tunable 'block'; it has none" in done.stderr


def test_an_interrupted_check_shows_what_it_has_and_what_is_left(
    workbench: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(
        request: object, law: object, chosen: object, sizes: object, device: object
    ) -> Iterator[dict[str, object]]:
        yield {"variant": "eager", "workload": "tokens=3 hidden=32", "status": "passed", "reason": None}
        raise KeyboardInterrupt

    monkeypatch.setattr("workbench.cli.check._rows", rows)
    words = ("check", "op=residual_rmsnorm", "variant=compiled,eager", "tokens=3", "hidden=32")
    done = workbench(*words)
    assert done.returncode == 130 and "eager" in done.stdout
    left = "what is left: workbench check op=residual_rmsnorm tokens=3 hidden=32 variant=compiled"
    assert left in " ".join(done.stdout.split())
    done = workbench(*words, "--json")
    assert done.returncode == 130 and len(json.loads(done.stdout)) == 1


def test_an_interrupted_selftest_shows_what_it_has_and_what_is_left(
    workbench: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def selftest(contract: object, *, report: Callable[[Outcome], None], **settings: object) -> None:
        report(Outcome("law", "law", "the law itself passes", False, True))
        report(Outcome("mutant", "one", "a rule bent", True, True))
        raise KeyboardInterrupt

    monkeypatch.setattr("workbench.gate.selftest.selftest", selftest)
    words = ("selftest", "op=residual_rmsnorm,sampling", "seed=3")
    done = workbench(*words)
    assert done.returncode == 130 and "killed 1 of 1 mutants" in done.stdout
    left = "what is left: workbench selftest seed=3 op=residual_rmsnorm,sampling"
    assert left in " ".join(done.stdout.split())
    done = workbench(*words, "--json")
    entry = json.loads(done.stdout)
    assert done.returncode == 130 and entry["mutants"][0]["mutant"] == "one" and not entry["ok"]
