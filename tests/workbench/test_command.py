"""How words become a request: parsers, keys, axes, tunables, and the one line that a mistake gets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench import command
from workbench.command import Command, Key, Reply, Request, parse_words
from workbench.contract import contract
from workbench.errors import UsageError


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (command.size, "63", 63),
        (command.size, "64k", 65536),
        (command.size, "1M", 1 << 20),
        (command.size, "-1", -1),
        (command.sizes, "1,8,64k", [1, 8, 65536]),
        (command.words, "a,b", ["a", "b"]),
        (command.duration, "90s", 90.0),
        (command.duration, "2h", 7200.0),
        (command.duration, "500ms", 0.5),
        (command.duration, "1.5", 1.5),
        (command.flag, "yes", True),
        (command.flag, "0", False),
        (command.axis_values, "1,64k,fp8", [1, 65536, "fp8"]),
        (command.ops, "lightning_decode", ["lightning_decode"]),
        (command.one_of(("a", "b")), "b", "b"),
    ],
)
def test_parsers(parse: Callable[[str], Any], text: str, value: Any) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (command.size, "64q", "write it as 63, 64k or 1M"),
        (command.size, "1.5k", "is no size"),
        (command.sizes, "1,,2", "an empty word"),
        (command.duration, "soon", "write it as 90s"),
        (command.duration, "0ms", "longer than nothing"),
        (command.count, "0", "from 1 to 64k"),
        (command.count, "1G", "from 1 to 64k"),
        (command.flag, "perhaps", "neither yes nor no"),
        (command.op, "lightning_decod", "did you mean 'lightning_decode'"),
        (command.one_of(("bash", "zsh")), "bahs", "did you mean 'bash'"),
    ],
)
def test_parsers_say_what_would_be_right(parse: Callable[[str], Any], text: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        parse(text)


def race(**fields: Any) -> Command:
    keys = (
        Key("op", command.ops, "ops", required=True),
        Key("budget", command.duration, "time", default=60.0),
        Key("seeds", int, "how many"),
        Key("plugin", command.words, "files", default=()),
    )
    options: dict[str, Any] = {"axes": True, "tunables": True, "examples": ("workbench race op=doubling",)} | fields
    return Command("race", "Race.", keys, lambda request: Reply({}, []), **options)


def test_keys_and_defaults(toy: Callable[..., Path]) -> None:
    request = parse_words(race(), ["op=doubling", "budget=2m"])
    assert dict(request) == {"op": ["doubling"], "budget": 120.0, "seeds": None, "plugin": (), "preset": None}
    assert (request.axes, request.tunables, request.json) == ({}, {}, False)
    assert request.words == ("op=doubling", "budget=2m")


def test_axes_sweep(toy: Callable[..., Path]) -> None:
    law = contract("doubling")
    request = parse_words(race(), ["op=doubling", "n=1,64k,1", "form=plain,packed"])
    assert request.axes == {"n": [1, 65536, 1], "form": ["plain", "packed"]}
    assert [w.label for w in request.workloads(law)] == [
        "n=1 form=plain",
        "n=1 form=packed",
        "n=64k form=plain",
        "n=64k form=packed",
    ]
    assert [w.label for w in parse_words(race(), ["op=doubling"]).workloads(law)] == [
        "n=3 form=plain",
        "n=63 form=plain",
    ]
    decode = parse_words(race(), ["op=doubling", "preset=decode"])
    assert decode.workloads(law) == list(law.presets["decode"])
    assert parse_words(race(), ["op=doubling"]).workloads(law, "decode") == list(law.presets["decode"])
    both = parse_words(race(), ["op=doubling", "preset=smoke", "form=packed"])
    assert [w.label for w in both.workloads(law)] == ["n=3 form=packed", "n=63 form=packed"]
    with pytest.raises(UsageError, match="doubling has no preset 'smoky'; did you mean 'smoke'"):
        parse_words(race(), ["op=doubling", "preset=smoky"]).workloads(law)


def test_an_axis_of_one_op_only(toy: Callable[..., Path]) -> None:
    request = parse_words(race(), ["op=doubling,lightning_decode", "batch=2"])
    assert [w["batch"] for w in request.workloads(contract("lightning_decode"))] == [2]
    assert len(request.workloads(contract("doubling"))) == 2


def test_tunables(toy: Callable[..., Path]) -> None:
    toy("tuned", declaration='tunables={"block": (1, 2)}', keywords=", *, block=1")
    assert parse_words(race(), ["op=doubling", "block=2", "n=3"]).tunables == {"block": "2"}
    with pytest.raises(UsageError, match="race has no key 'blok' for op=doubling; did you mean 'block'"):
        parse_words(race(), ["op=doubling", "blok=2"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["op=doublin"], "op=doublin: there is no op 'doublin'; did you mean 'doubling'?"),
        (["op=doubling", "budgt=1s"], "race has no key 'budgt' for op=doubling; did you mean 'budget'?"),
        (["op=doubling", "seeds=x"], "seeds=x: invalid literal for int"),
        (["op=doubling", "n=0"], "n=0 must be a whole number from 1 to 1M"),
        (["op=doubling", "n=many"], "n=many must be a whole number"),
        (["op=doubling", "form=plane"], "form=plane: did you mean 'plain'?"),
        (["op=doubling", "n="], "n= has no value"),
        (["op=doubling", "n=1,,2"], "n=1,,2: an empty word"),
        (["op=doubling", "op=doubling"], "op= is given twice"),
        (["doubling"], "'doubling' is not key=value; did you mean op=doubling?"),
        (["fast"], "'fast' is not key=value; race takes op=, budget=, seeds=, plugin=, preset="),
        (["n=3"], "race needs op=…: ops (as in: workbench race op=doubling)"),
    ],
)
def test_mistakes(toy: Callable[..., Path], words: list[str], expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_words(race(), words)
    assert expected in str(caught.value)


def test_bare_words_fill_positions() -> None:
    why = Command(
        "why",
        "Why.",
        (Key("a", str, "one"), Key("b", str, "other")),
        lambda r: Reply({}, []),
        (),
        positional=("a", "b"),
    )
    assert dict(parse_words(why, ["m1", "m2"])) == {"a": "m1", "b": "m2"}
    assert dict(parse_words(why, ["b=m2", "m1"])) == {"a": "m1", "b": "m2"}
    with pytest.raises(UsageError, match="why takes 2 bare"):
        parse_words(why, ["m1", "m2", "m3"])


def test_a_request_is_a_mapping() -> None:
    request = Request({"a": 1}, json=True)
    assert request["a"] == 1 and list(request) == ["a"] and len(request) == 1 and request.json
