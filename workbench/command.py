"""What a command is, and how its `key=value` words are read.

Each file of `workbench/cli/` defines one `COMMAND`. This module imports neither torch nor a contract at its
top: help and completion must answer at once.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from workbench.errors import UsageError, nearest

if TYPE_CHECKING:
    from workbench.contract import AxisValue, Contract, Workload

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclasses.dataclass(frozen=True)
class Key:
    """One `key=value` that a command takes.

    `parse` turns the text into a value and raises UsageError or ValueError if it can't. `default` is used as it
    is when the key is not given; a `required` key must be. `complete` lists the values for shell completion;
    keys named `op`, `ops`, `variant`, `variants` and `preset` need none.
    """

    name: str
    parse: Callable[[str], Any]
    doc: str
    default: Any = None
    required: bool = False
    complete: Callable[[], Iterable[str]] | None = None


@dataclasses.dataclass
class Reply:
    """What a command answers: `data` (JSON-able) for `--json`, `text` (Rich renderables) for a person.

    Plain strings in `text`, and in the tables it holds, are shown literally, square brackets included: use
    `rich.text.Text` for colour. `code` is the exit code: 0 fine, 1 a failed gate, 130 interrupted.
    """

    data: Any
    text: list[Any]
    code: int = 0


class Request(Mapping[str, Any]):
    """The parsed keys of one call, by name, defaults included.

    `axes` holds the values given for axes of the op (`batch=1,8` → `{"batch": [1, 8]}`), `tunables` the texts
    given for tunables of its variants, `progress` a console on standard error, `json` whether `--json` was
    given, `words` the words as typed, to say how to repeat or continue a call.
    """

    def __init__(
        self,
        keys: Mapping[str, Any],
        axes: Mapping[str, list[AxisValue]] | None = None,
        *,
        tunables: Mapping[str, str] | None = None,
        progress: Console | None = None,
        json: bool = False,
        words: Sequence[str] = (),
    ) -> None:
        """See the class."""
        self._keys = dict(keys)
        self.axes = dict(axes or {})
        self.tunables = dict(tunables or {})
        self.progress = progress or console(stderr=True)
        self.json = json
        self.words = tuple(words)

    def __getitem__(self, key: str) -> Any:
        """Value of `key`."""
        return self._keys[key]

    def __iter__(self) -> Iterator[str]:
        """Names of the keys."""
        return iter(self._keys)

    def __len__(self) -> int:
        """How many keys there are."""
        return len(self._keys)

    def workloads(self, contract: Contract, default: str = "smoke") -> list[Workload]:
        """The workloads asked for, without repetition, in the order given.

        `preset=` names them; axes replace sizes in each, swept as a product. With axes alone the rest is at
        its default; with neither it is the preset `default`. UsageError for a preset the contract lacks.
        """
        preset = self._keys.get("preset")
        if preset is not None and preset not in contract.presets:
            raise UsageError(f"{contract.name} has no preset {preset!r}; {nearest(preset, contract.presets)}")
        axes = {name: values for name, values in self.axes.items() if name in contract.axes}
        if not axes:
            return list(contract.presets[preset or default])
        bases = contract.presets[preset] if preset else (contract.workload(),)
        found: dict[Workload, None] = {}
        for base in bases:
            for values in itertools.product(*axes.values()):
                sizes = {**dict(base.axes), **dict(zip(axes, values))}
                found[contract.workload("custom", **sizes)] = None
        return list(found)


@dataclasses.dataclass(frozen=True)
class Command:
    """One command of `workbench`.

    `run` takes the parsed request and returns what to show. `examples` are whole lines to paste. With `axes`
    the command also takes the axes of the op that its key `op` names (and the key `preset`), with `tunables`
    the tunables of the op's variants. `positional` names the keys that bare words fill, in order.
    """

    name: str
    summary: str
    keys: tuple[Key, ...]
    run: Callable[[Request], Reply]
    examples: tuple[str, ...]
    axes: bool = False
    description: str = ""
    tunables: bool = False
    positional: tuple[str, ...] = ()

    @property
    def all_keys(self) -> tuple[Key, ...]:
        """The keys, with `preset` where axes are taken."""
        if self.axes and all(key.name != "preset" for key in self.keys):
            return (*self.keys, Key("preset", str, "a named set of workloads: smoke, decode, prefill, long, race"))
        return self.keys


class _Console(Console):
    """Leaves a reader that has gone (`| head`) to the caller, where Rich would end the process with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(*, stderr: bool = False) -> Console:
    """A Rich console that shows strings literally; wide enough for tables where the output is no terminal."""
    made = _Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not made.is_terminal and made.width < 160:
        made = _Console(stderr=stderr, markup=False, emoji=False, highlight=False, width=160)
    return made


def op_files() -> list[str]:
    """Names of the ops, from the files of `workbench/ops/`, without importing any."""
    return _stems("workbench.ops")


def variant_files(op: str) -> list[str]:
    """Names of the files of `variants/<op>/`, without importing any."""
    spec = importlib.util.find_spec("variants")
    places = [Path(place) / op for place in (spec.submodule_search_locations or ())] if spec else []
    return sorted(p.stem for place in places for p in place.glob("*.py") if not p.stem.startswith("_"))


def command_files() -> list[str]:
    """Names of the commands, from the files of `workbench/cli/`."""
    return _stems("workbench.cli")


def _stems(package: str) -> list[str]:
    spec = importlib.util.find_spec(package)
    places = (spec.submodule_search_locations or ()) if spec else ()
    return sorted(p.stem for place in places for p in Path(place).glob("*.py") if not p.stem.startswith("_"))


# Parsers: each takes the text after `key=` and raises UsageError with what would be right.


def op(text: str) -> str:
    """The name of an op."""
    return one_of(op_files(), what="op")(text)


def ops(text: str) -> list[str]:
    """Names of ops, separated by commas; `all` is every op."""
    return op_files() if text == "all" else [op(word) for word in words(text)]


def one_of(known: Iterable[str], what: str = "") -> Callable[[str], str]:
    """A parser that takes one of the words `known`."""
    names = tuple(known)

    def parse(text: str) -> str:
        if text not in names:
            raise UsageError(f"there is no {what} {text!r}; {nearest(text, names)}" if what else nearest(text, names))
        return text

    return parse


def words(text: str) -> list[str]:
    """`a,b` as a list of words."""
    found = [word.strip() for word in text.split(",")]
    if not all(found):
        raise UsageError("an empty word; write them as a,b,c")
    return found


def size(text: str) -> int:
    """A whole number as people write it: `63`, `64k` (65536), `1M` (1048576)."""
    match = re.fullmatch(r"(-?\d+)([kKmMgG]?)", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no size; write it as 63, 64k or 1M")
    return int(match[1]) * _UNITS[match[2].lower()]


def count(text: str) -> int:
    """A number of things to try, from 1 to 65536: `200`, `1k`."""
    found = size(text)
    if not 1 <= found <= 1 << 16:
        raise UsageError("must be a whole number from 1 to 64k")
    return found


def sizes(text: str) -> list[int]:
    """`1,8,64k` as a list of whole numbers."""
    return [size(word) for word in words(text)]


def duration(text: str) -> float:
    """A time in seconds: `90s`, `5m`, `2h`, `500ms`; a bare number is seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|min|m|h)?", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no time; write it as 90s, 5m or 2h")
    found = float(match[1]) * _SECONDS[match[2] or "s"]
    if not found:
        raise UsageError("must be longer than nothing; write it as 90s, 5m or 2h")
    return found


def flag(text: str) -> bool:
    """`yes` or `no` (also 1, 0, true, false, on, off)."""
    if text.lower() in ("yes", "1", "true", "on"):
        return True
    if text.lower() in ("no", "0", "false", "off"):
        return False
    raise UsageError(f"{text!r} is neither yes nor no")


def axis_values(text: str) -> list[AxisValue]:
    """Values of an axis: sizes where they read as such, words otherwise."""
    return [size(word) if re.fullmatch(r"-?\d+[kKmMgG]?", word) else word for word in words(text)]


# From words to a request.


def split_words(command: Command, given: Sequence[str]) -> dict[str, str]:
    """The words as texts by key; bare words fill `positional`. UsageError for a word that fits nowhere."""
    pairs: dict[str, str] = {}
    free = [name for name in command.positional if not any(word.startswith(f"{name}=") for word in given)]
    for word in given:
        name, separator, text = word.partition("=")
        if not separator:
            if not free:
                raise UsageError(_bare(command, word))
            name, text = free.pop(0), word
        if name in pairs:
            raise UsageError(f"{name}= is given twice")
        if not text:
            raise UsageError(f"{name}= has no value")
        pairs[name] = text
    return pairs


def parse_words(command: Command, given: Sequence[str], *, json: bool = False) -> Request:
    """Read the words of a call. UsageError, with the nearest right word, for anything that does not fit."""
    pairs = split_words(command, given)
    keys = {key.name: key for key in command.all_keys}
    parsed = {key.name: _parse(key, pairs[key.name]) if key.name in pairs else key.default for key in keys.values()}
    rest = {name: text for name, text in pairs.items() if name not in keys}
    axes, tunables = _axes_and_tunables(command, rest, parsed)
    for key in keys.values():
        if key.required and key.name not in pairs:
            raise UsageError(f"{command.name} needs {key.name}=…: {key.doc}{_example(command)}")
    return Request(parsed, axes, tunables=tunables, json=json, words=given)


def _parse(key: Key, text: str) -> Any:
    try:
        return key.parse(text)
    except UsageError as mistake:
        raise UsageError(f"{key.name}={text}: {mistake}") from None
    except ValueError as mistake:
        raise UsageError(f"{key.name}={text}: {mistake}") from None


def _bare(command: Command, word: str) -> str:
    message = f"{word!r} is not key=value"
    if word in op_files():
        return f"{message}; did you mean op={word}?"
    if command.positional:
        return f"{command.name} takes {len(command.positional)} bare word(s), so {word!r} is one too many"
    return f"{message}; {command.name} takes {', '.join(key.name + '=' for key in command.all_keys)}"


def _example(command: Command) -> str:
    return f" (as in: {command.examples[0]})" if command.examples else ""


def named_ops(parsed: Mapping[str, Any]) -> list[str]:
    """The ops that a request's keys name; all of them if it names none."""
    value = parsed.get("op") or parsed.get("ops")
    if not value:
        return op_files()
    return [value] if isinstance(value, str) else list(value)


def _axes_and_tunables(
    command: Command, rest: Mapping[str, str], parsed: Mapping[str, Any]
) -> tuple[dict[str, list[AxisValue]], dict[str, str]]:
    """Sort the words that are no keys of the command into axes and tunables of the ops named."""
    if not rest:
        return {}, {}
    known = [key.name for key in command.all_keys]
    takers: dict[str, list[Contract]] = {}
    tunable_names: set[str] = set()
    names = named_ops(parsed)
    if command.axes:
        from workbench.contract import contract

        for name in names:
            law = contract(name)
            for axis in law.axes:
                takers.setdefault(axis, []).append(law)
    if command.tunables and any(name not in takers for name in rest):
        from workbench.registry import entries

        plugins = parsed.get("plugin") or ()
        plugins = [plugins] if isinstance(plugins, str) else plugins
        for name in names:
            for entry in entries(name, plugins):
                tunable_names.update(entry.variant.tunables if entry.variant else ())
    axes: dict[str, list[AxisValue]] = {}
    tunables: dict[str, str] = {}
    for name, text in rest.items():
        if name in takers:
            try:
                axes[name] = axis_values(text)
            except UsageError as mistake:
                raise UsageError(f"{name}={text}: {mistake}") from None
            for law in takers[name]:
                for value in axes[name]:
                    law.workload("custom", **{name: value})
        elif name in tunable_names:
            tunables[name] = text
        else:
            of = f" for op={names[0]}" if takers and len(names) == 1 else ""
            raise UsageError(
                f"{command.name} has no key {name!r}{of}; {nearest(name, [*known, *takers, *sorted(tunable_names)])}"
            )
    return axes, tunables
