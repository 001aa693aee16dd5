"""`workbench <command> key=value …`: find the command, read its words, run it, show its reply.

Exit codes: 0 fine, 1 a gate failed or a mutant survived, 2 the call was wrong (one line says how), 70 a fault of
the workbench itself, 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.metadata
import json
import math
import os
import signal
import sys
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import click
from click.shell_completion import CompletionItem
from rich.table import Table

from workbench.command import Command, Reply, command_files, console, parse_words
from workbench.completion import COMPLETE_VARIABLE, answers
from workbench.errors import UsageError, nearest
from workbench.fitting import fitted

FAULT = 70
"""Exit code of a fault of the workbench itself (sysexits' EX_SOFTWARE)."""

_ABOUT = """Races implementations of MiniCPM-SALA's hot operations; each is proven right before it is timed.
Lists sweep (batch=1,8,32); sizes read as written (context=64k, context=1M)."""

_EXAMPLES = (
    "workbench ops",
    "workbench variants op=lightning_decode",
    "workbench check op=lightning_decode variant=eager",
    "workbench bench op=lightning_decode batch=1,8,32",
    "workbench new op=lightning_decode name=mine",
)


def load_command(name: str) -> Command:
    """The command of that name; UsageError with the nearest name if there is none."""
    names = command_files()
    if name not in names:
        raise UsageError(f"there is no command {name!r}; {nearest(name, names)}")
    return importlib.import_module(f"workbench.cli.{name}").COMMAND


def version() -> str:
    """Version of the installed package."""
    try:
        return importlib.metadata.version("sala-workbench")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def command_help(command: Command) -> str:
    """The text of `workbench <command> --help`."""
    bare = "".join(f" {name.upper()}" for name in command.positional)
    rows = []
    for key in command.all_keys:
        notes = ["required"] if key.required else []
        if key.default not in (None, "", (), [], False):
            default = ",".join(map(str, key.default)) if isinstance(key.default, (list, tuple)) else key.default
            notes.append(f"default {default}")
        rows.append((f"{key.name}=", key.doc + (f" ({', '.join(notes)})" if notes else "")))
    if command.axes:
        rows.append(("<axis>=", "an axis of the op, as batch=1,8; `workbench ops op=…` lists them"))
    if command.tunables:
        rows.append(("<tunable>=", "a tunable of the variant; `workbench variants op=…` lists them"))
    parts = [f"Usage: workbench {command.name}{bare} key=value … [--json]", command.summary]
    parts += [textwrap.dedent(command.description).strip()] if command.description else []
    parts += ["Keys:\n" + _columns(rows)] if rows else []
    parts.append(
        "Options:\n" + _columns([("--json", "the result as JSON"), ("--traceback", "show where a fault lies")])
    )
    parts.append("Examples:\n" + "\n".join(f"  {example}" for example in command.examples))
    return "\n\n".join(parts)


def main_help() -> str:
    """The text of `workbench --help`."""
    rows = [(name, load_command(name).summary) for name in command_files()]
    return "\n\n".join(
        [
            "Usage: workbench <command> key=value … [--json]",
            _ABOUT,
            "Commands (each has --help with examples):\n" + _columns(rows),
            "Examples:\n" + "\n".join(f"  {example}" for example in _EXAMPLES),
        ]
    )


def _columns(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows) + 2
    wrapped = (textwrap.wrap(text, 100 - width) or [""] for _, text in rows)
    return "\n".join(
        f"  {name:<{width}}" + f"\n{'':<{width + 2}}".join(lines) for (name, _), lines in zip(rows, wrapped)
    )


class _Words(click.Argument):
    """The `key=value` words of a command, completed by what the command declares."""

    def __init__(self, command: Command) -> None:
        super().__init__(["words"], nargs=-1, type=click.UNPROCESSED)
        self.declared = command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(answer) for answer in answers(self.declared, ctx.params.get("words") or (), incomplete)]


class _Command(click.Command):
    """A click command around one of ours."""

    def __init__(self, command: Command) -> None:
        options = [click.Option([f"--{name}"], is_flag=True) for name in ("json", "traceback")]
        super().__init__(command.name, params=[_Words(command), *options], callback=self._run)
        self.declared = command

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(command_help(self.declared) + "\n")

    def _run(self, words: tuple[str, ...], json: bool, traceback: bool) -> int:
        return execute(self.declared, words, as_json=json, show_traceback=traceback)


class _Group(click.Group):
    """All commands: the files of `workbench/cli/`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return command_files()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _Command(load_command(cmd_name)) if cmd_name in command_files() else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not ctx.resilient_parsing and not args[0].startswith("-"):
            load_command(args[0])
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(main_help() + "\n")


def execute(command: Command, words: Sequence[str], *, as_json: bool = False, show_traceback: bool = False) -> int:
    """Run one command on its words, print its reply or its error, and return the exit code."""
    try:
        reply = command.run(parse_words(command, words, json=as_json))
    except UsageError as mistake:
        return _fail(str(mistake), 2, as_json)
    except KeyboardInterrupt:
        return _fail("interrupted", 130, as_json)
    except Exception as fault:
        if show_traceback:
            traceback.print_exc()
        first = (str(fault).strip().splitlines() or [""])[0]
        hint = "" if show_traceback else "; the same line with --traceback shows where"
        return _fail(f"fault in {command.name}: {type(fault).__name__}: {first}{hint}", FAULT, as_json)
    try:
        _show(reply, as_json)
    except BrokenPipeError:  # the reader (`| head`) has left; nothing more can be shown to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return reply.code


def _show(reply: Reply, as_json: bool) -> None:
    if as_json:
        print(json.dumps(plain(reply.data), indent=2, ensure_ascii=False))
    else:
        out = console()
        for part in reply.text:
            out.print(fitted(part, out) if isinstance(part, Table) else part, soft_wrap=isinstance(part, str))
    sys.stdout.flush()


def _fail(message: str, code: int, as_json: bool) -> int:
    line = " ".join(message.split())
    print(f"workbench: {line}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": line, "code": code}, ensure_ascii=False))
    return code


def plain(value: Any) -> Any:
    """`value` in JSON's types: records as objects, enums by value, paths as text, nan and inf as their names."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def run(arguments: Sequence[str]) -> int:
    """Run the command line `workbench <arguments>` and return its exit code."""
    group = _Group("workbench", params=[click.Option(["--version"], is_flag=True, is_eager=True, callback=_version)])
    as_json = "--json" in arguments
    try:
        result = group.main(
            list(arguments) or ["--help"],
            prog_name="workbench",
            complete_var=COMPLETE_VARIABLE,
            standalone_mode=False,
        )
        return result if isinstance(result, int) else 0
    except UsageError as mistake:
        return _fail(str(mistake), 2, as_json)
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.ClickException as mistake:
        return _fail(mistake.format_message(), 2, as_json)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", 130, as_json)


def _version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        print(f"workbench {version()}")
        ctx.exit()


def listen_for_interrupts() -> None:
    """Make Ctrl-C end this process at once where KeyboardInterrupt would not.

    Libraries swallow an interrupt that arrives while they are imported, when there is nothing to lose yet; and whoever
    presses a second time does not want to wait. A process started with interrupts ignored goes on ignoring them.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return
    pressed = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        again, pressed = pressed, True
        while frame is not None and not again:
            again = frame.f_code.co_filename.startswith("<frozen importlib")
            frame = frame.f_back
        if again:
            os.write(2, b"workbench: interrupted\n")
            os._exit(130)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)


def main() -> None:
    """Run the command line of this process and leave with its exit code."""
    listen_for_interrupts()
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
