"""The registry: what is found, what is refused, and in which words."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.contract import contract, op_names
from workbench.errors import UsageError
from workbench.registry import entries, find, parameters, place, prepare, refusal
from workbench.signature import satisfies
from workbench.variant import Variant

CPU = torch.device("cpu")
Toy = Callable[..., Path]


def reason(name: str) -> str:
    found = [entry for entry in entries("doubling") if entry.name == name]
    assert len(found) == 1 and found[0].variant is None and found[0].reason
    return found[0].reason


def test_folder_is_the_list(toy: Toy) -> None:
    assert entries("doubling") == []
    toy("one")
    toy("two", declaration='tunables={"block": (1, 2)}', keywords=", *, block=2")
    toy("_shared", text="VALUE = 1\n")
    found = entries("doubling")
    assert [(entry.name, entry.reason, entry.origin) for entry in found] == [
        ("one", None, "variants"),
        ("two", None, "variants"),
    ]
    two = find("doubling", "two")
    assert (two.op, two.tunables, two.defaults) == ("doubling", {"block": (1, 2)}, {"block": 2})
    assert two.path.name == "two.py"


def test_the_variant_runs(toy: Toy) -> None:
    toy("one")
    law = contract("doubling")
    args = law.make_inputs(law.workload(n=3), 0, "ordinary", CPU)
    find("doubling", "one").function(**args)
    assert torch.equal(args["out"], args["x"] * 6)


@pytest.mark.parametrize(
    ("arguments", "declaration", "expected"),
    [
        ("x, weight, out", "", "argument 'factor' of doubling is missing"),
        ("x, wieght, weight, out, factor", "", "doubling has no argument 'wieght'; did you mean 'weight'?"),
        ("x, out, weight, factor", "", "argument 'out' stands where doubling has 'weight'"),
        ("x, weight, out, factor, block=1", 'tunables={"block": (1, 2)}', "tunable 'block' must be keyword-only"),
        ("x, weight, out, factor, *, block", 'tunables={"block": (1, 2)}', "tunable 'block' has no default"),
        ("x, weight, out, factor, *, blokc=1", 'tunables={"block": (1, 2)}', "'blokc' is neither an argument"),
        ("x, weight, out, factor, *, block=3", 'tunables={"block": (1, 2)}', "default block=3 is not among"),
        ("x, weight, out, factor", 'tunables={"block": (1, 2)}', "tunable 'block' of @variant is not among"),
        ("x, weight, out, factor, **rest", "", "takes '**rest'; every argument must be spelled out"),
        ("*x", "", "takes '*x'"),
        ("x, weight, out, /, factor", "", "argument 'x' is positional-only"),
        ("x, weight, out, factor", 'runs_on=("gpu",)', "runs_on='gpu'"),
        ("x, weight, out, factor", "runs_on=()", "runs_on is empty"),
        ("x, weight, out, factor", 'arch="sm_90"', "architecture 'sm_90' is not like '>=sm_80'"),
        ("x, weight, out, factor", 'op="lightning_decode"', "is declared for the op 'lightning_decode'"),
    ],
)
def test_misfits_are_named(toy: Toy, arguments: str, declaration: str, expected: str) -> None:
    text = f"from workbench.variant import variant\n@variant({declaration})\ndef bad({arguments}): ...\n"
    toy("bad", text=text)
    toy("good")
    message = reason("bad")
    assert message.startswith("variants/doubling/bad.py: bad()") and expected in message
    assert [entry.name for entry in entries("doubling") if entry.variant] == ["good"]
    with pytest.raises(UsageError, match="variant 'bad' of doubling is unavailable: variants/doubling/bad.py"):
        find("doubling", "bad")


def test_one_file_one_variant(toy: Toy) -> None:
    toy("one", file="other.py")
    assert reason("other") == (
        "variants/doubling/other.py: one file holds one variant, named as the file: expected other(), found one()"
    )
    toy("none", text="x = 1\n")
    assert "expected none(), found none" in reason("none")


def test_an_imported_variant_is_not_declared_again(toy: Toy) -> None:
    toy("one")
    text = "from variants.doubling.one import one\n" + toy("two").read_text()
    toy("two", text=text)
    assert [entry.reason for entry in entries("doubling")] == [None, None]


def test_missing_package_is_a_reason(toy: Toy) -> None:
    toy("needs", text="import fla_of_nobody.ops\n")
    assert reason("needs").startswith("needs the package 'fla_of_nobody'; ")
    assert reason("needs").endswith("-m pip install fla_of_nobody")
    toy("lost", text="import workbench.nothing_here\n")
    assert reason("lost") == "variants/doubling/lost.py does not load: No module named 'workbench.nothing_here'"
    toy("later", declaration='requires=("fla_of_nobody",)')
    assert "pip install fla_of_nobody" in str(refusal(find("doubling", "later"), None, CPU))


def test_a_file_that_breaks_is_a_reason(toy: Toy) -> None:
    toy("breaks", text="\n1 / 0\n")
    assert reason("breaks") == (
        "variants/doubling/breaks.py does not load: ZeroDivisionError: division by zero (line 2 of breaks.py)"
    )
    toy("garbled", text="def (:\n")
    assert "SyntaxError" in reason("garbled")


def test_unknown_names_get_the_nearest(toy: Toy) -> None:
    toy("triton_fused")
    with pytest.raises(UsageError, match="doubling has no variant 'triton_fusd'; did you mean 'triton_fused'"):
        find("doubling", "triton_fusd")
    with pytest.raises(UsageError, match="there is no op 'doublin'; did you mean 'doubling'"):
        entries("doublin")


def plugin(path: Path, declaration: str = 'op="doubling"', name: str = "mine") -> str:
    path.write_text(
        f"from workbench.variant import variant\n@variant({declaration})\ndef {name}(x, weight, out, factor): ...\n"
    )
    return str(path)


def test_plugin_file(toy: Toy, tmp_path: Path) -> None:
    toy("one")
    path = plugin(tmp_path / "mine.py")
    assert [(entry.name, entry.origin) for entry in entries("doubling", [path, path])] == [
        ("one", "variants"),
        ("mine", path),
    ]
    assert find("doubling", "mine", [path]).origin == path
    assert all(entry.name != "mine" for entry in entries("lightning_decode", [path]))
    plugin(tmp_path / "mine.py", name="changed")
    assert find("doubling", "changed", [path]).name == "changed"


def test_plugin_in_a_folder_named_as_the_op(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "doubling").mkdir(parents=True)
    path = plugin(tmp_path / "elsewhere" / "doubling" / "mine.py", "")
    assert find("doubling", "mine", [path]).name == "mine"


def test_plugin_mistakes_end_the_command(toy: Toy, tmp_path: Path) -> None:
    toy("one")
    for text, expected in [
        ("x = 1\n", "declares no variant"),
        ("1 / 0\n", "does not load: ZeroDivisionError"),
        ("raise SystemExit(3)\n", "does not load: SystemExit: 3"),
        ("def (:\n", r"does not load: SyntaxError: invalid syntax \(bad.py, line 1\)$"),
        ("from workbench.variant import variant\n@variant()\ndef a(x): ...\n", "names no op"),
        ("from workbench.variant import variant\n@variant(op='doublign')\ndef a(x): ...\n", "did you mean 'doubling'"),
        (
            "from workbench.variant import variant\n@variant(op='doubling')\ndef a(x): ...\n",
            "'weight' of doubling is missing",
        ),
    ]:
        path = tmp_path / "bad.py"
        path.write_text(text)
        with pytest.raises(UsageError, match=expected) as caught:
            entries("doubling", [str(path)])
        assert str(path) in str(caught.value)
    with pytest.raises(UsageError, match="there is no such file"):
        entries("doubling", [str(tmp_path / "nowhere.py")])
    path.write_text("import fla_of_nobody\n")
    assert "pip install fla_of_nobody" in str(entries("doubling", [str(path)])[-1].reason)


def test_two_of_one_name_are_refused(toy: Toy, tmp_path: Path) -> None:
    toy("mine")
    path = plugin(tmp_path / "mine.py")
    with pytest.raises(UsageError) as caught:
        find("doubling", "mine", [path])
    assert str(caught.value) == (
        f"two variants of doubling are named 'mine': variants/doubling/mine.py and {path}; rename one"
    )


class Point:
    """An entry point as importlib.metadata gives it."""

    def __init__(self, name: str, target: Any) -> None:
        """Keep what `load` gives."""
        self.name, self.value, self._target = name, "somebody.kernels", target

    def load(self) -> Any:
        """The target, or its failure."""
        if isinstance(self._target, Exception):
            raise self._target
        return self._target


def with_entry_points(monkeypatch: pytest.MonkeyPatch, *points: Point) -> None:
    def entry_points(*, group: str) -> list[Point]:
        assert group == "workbench.variants"
        return list(points)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)


def test_entry_points(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = find("doubling", "mine", [plugin(tmp_path / "mine.py")]).function
    import sys

    module = sys.modules[function.__module__]
    missing = ModuleNotFoundError("No module named 'nothing_of_theirs'", name="nothing_of_theirs")
    with_entry_points(monkeypatch, Point("broken", missing))
    assert [(e.name, e.origin) for e in entries("doubling")] == [("broken", "entry point broken")]
    assert "pip install nothing_of_theirs" in str(entries("doubling")[0].reason)
    for target in (function, module):
        with_entry_points(monkeypatch, Point("theirs", target))
        assert [(e.name, e.reason, e.origin) for e in entries("doubling")] == [("mine", None, "entry point theirs")]
        assert find("doubling", "mine").origin == "entry point theirs"
    with_entry_points(monkeypatch, Point("theirs", print))
    assert entries("doubling")[0].reason == "entry point theirs (somebody.kernels): print lacks the decorator @variant"
    with_entry_points(monkeypatch, Point("a", function), Point("b", function))
    with pytest.raises(UsageError, match="named 'mine': entry point a and entry point b"):
        entries("doubling")


def made(**fields: Any) -> Variant:
    return Variant("doubling", "made", lambda **_: None, **fields)


def test_place_and_refusal(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = contract("doubling").workload()
    assert place(made(), CPU) == "cpu"
    assert place(made(), torch.device("cuda")) == "cuda"
    interpreted = made(requires=("triton",), runs_on=("cuda", "interpreter"))
    assert place(interpreted, CPU) == "interpreter"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("workbench.registry._importable", lambda package: True)
    assert refusal(interpreted, workload, CPU) is None
    assert "unset it" in str(refusal(interpreted, None, torch.device("cuda")))
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "set TRITON_INTERPRET=1" in str(refusal(interpreted, None, CPU))
    assert refusal(made(runs_on=("cuda",)), None, CPU) == "runs on cuda, not on cpu"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert refusal(made(arch=">=sm_100"), None, torch.device("cuda")) == "needs >=sm_100, this GPU is sm_90"
    assert refusal(made(arch=">=sm_80,<sm_120"), None, torch.device("cuda")) is None
    picky = made(supports=lambda workload: None if workload["n"] == 64 else f"needs n=64, got {workload['n']}")
    assert refusal(picky, workload, CPU) is None
    assert refusal(picky, workload.replace(n=3), CPU) == "needs n=64, got 3"
    assert refusal(picky, None, CPU) is None
    broken = made(supports=lambda workload: 1 / 0)
    assert "its supports() failed: ZeroDivisionError: division by zero" in str(refusal(broken, workload, CPU))


@pytest.mark.parametrize(
    ("condition", "capability", "expected"),
    [
        (">=sm_80", 90, True),
        (">=sm_90", 80, False),
        ("==sm_90a", 90, True),
        ("<sm_120", 120, False),
        (">sm_80, <=sm_90", 90, True),
    ],
)
def test_architectures(condition: str, capability: int, expected: bool) -> None:
    assert satisfies(condition, capability) is expected


def test_parameters(toy: Toy) -> None:
    toy("plain")
    toy(
        "tuned",
        declaration='tunables={"block": (1, 2, 4), "mode": ("a", "b")}, heuristic=lambda w: {"block": 4}',
        keywords=", *, block=1, mode='a'",
    )
    workload = contract("doubling").workload()
    tuned = find("doubling", "tuned")
    assert parameters(tuned, workload, {}) == {"block": 4, "mode": "a"}
    assert parameters(tuned, workload, {"block": "2", "mode": "b"}) == {"block": 2, "mode": "b"}
    with pytest.raises(UsageError, match="has no tunable 'blok'; did you mean 'block'"):
        parameters(tuned, workload, {"blok": 1})
    with pytest.raises(UsageError, match="block=3: there are: 1, 2, 4"):
        parameters(tuned, workload, {"block": 3})
    with pytest.raises(UsageError, match="has no tunable 'x'; it has none"):
        parameters(find("doubling", "plain"), workload, {"x": 1})
    with pytest.raises(UsageError, match="the heuristic sets 'blck'"):
        parameters(made_with_file(tuned, lambda w: {"blck": 1}), workload, {})


def made_with_file(variant: Variant, heuristic: Callable[[Any], dict[str, Any]]) -> Variant:
    return Variant("doubling", "made", variant.function, tunables=variant.tunables, heuristic=heuristic)


def test_prepare_replaces_weights_only(toy: Toy) -> None:
    toy("one", declaration='prepare=lambda workload, weight: {"weight": weight + 1}')
    toy("two", declaration='prepare=lambda workload, weight: {"x": weight}')
    law = contract("doubling")
    args = law.make_inputs(law.workload(n=3), 0, "ordinary", CPU)
    prepared = prepare(find("doubling", "one"), law.workload(n=3), args)
    assert torch.equal(prepared["weight"], args["weight"] + 1) and prepared["x"] is args["x"]
    with pytest.raises(UsageError, match="prepare returned 'x'"):
        prepare(find("doubling", "two"), law.workload(n=3), args)


def test_every_variant_of_ours_fits_its_contract() -> None:
    for op in op_names():
        for entry in entries(op):
            assert entry.variant is not None or str(entry.reason).startswith("needs the package"), entry.reason
