"""Shell completion: what may follow a half-typed word, and the scripts that ask for it.

A shell passes the line up to the cursor; the answers are whole words, `op=lightning_decode`. Nothing here
imports torch unless axes are asked for, which only a contract knows.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from click.shell_completion import CompletionItem, ShellComplete, add_completion_class

from workbench.command import Command, Key, flag, named_ops, op_files, variant_files

COMPLETE_VARIABLE = "_WORKBENCH_COMPLETE"
"""Environment variable by which a shell asks for completions."""

PRESETS = ("smoke", "decode", "prefill", "long", "race")

BASH = """\
_workbench_completion() {
    local line="${COMP_LINE:0:COMP_POINT}" word answer
    word="${line##*[[:space:]]}"
    COMPREPLY=()
    while IFS= read -r answer; do
        # bash replaces only what follows '=' where '=' breaks words
        if [[ $COMP_WORDBREAKS == *=* && $word == *=* ]]; then answer="${answer#"${word%%=*}="}"; fi
        COMPREPLY+=("$answer")
    done < <(COMP_WORDS="$line" _WORKBENCH_COMPLETE=bash_complete "$1" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=/] ]]; then compopt -o nospace; fi
}
complete -o nosort -F _workbench_completion workbench
"""

ZSH = """\
#compdef workbench
_workbench_completion() {
    local -a closed open
    local answer
    while IFS= read -r answer; do
        if [[ $answer == *[=/] ]]; then open+=("$answer"); else closed+=("$answer"); fi
    done < <(COMP_WORDS="${words[1,CURRENT]}" _WORKBENCH_COMPLETE=zsh_complete ${words[1]} 2>/dev/null)
    (( $#open )) && compadd -Q -S '' -a open
    (( $#closed )) && compadd -Q -a closed
    return 0
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _workbench_completion "$@"
else
    compdef _workbench_completion workbench
fi
"""

FISH = """\
function _workbench_completion
    COMP_WORDS=(commandline -cp | string collect) _WORKBENCH_COMPLETE=fish_complete workbench 2>/dev/null
end
complete --no-files --command workbench --arguments '(_workbench_completion)'
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


class _Line(ShellComplete):
    """Click's side of the protocol: the line up to the cursor in, one answer a line out."""

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ.get("COMP_WORDS", "")
        words = line.split()
        incomplete = "" if not words or line[-1].isspace() else words.pop()
        return words[1:], incomplete

    def format_completion(self, item: CompletionItem) -> str:
        return item.value


for _shell, _script in SCRIPTS.items():
    add_completion_class(type(f"_{_shell.title()}", (_Line,), {"name": _shell, "source_template": _script}), _shell)


def answers(command: Command, given: Sequence[str], incomplete: str) -> list[str]:
    """Whole words that may stand where `incomplete` stands, after the words `given`."""
    pairs = dict(word.split("=", 1) for word in given if "=" in word)
    name, separator, text = incomplete.partition("=")
    if separator:
        before, comma, last = text.rpartition(",")
        head = f"{name}={before}{comma}"
        return [head + value for value in _values(command, name, last, pairs) if value.startswith(last)]
    keys = [key.name for key in command.all_keys]
    if command.axes and (pairs.get("op") or pairs.get("ops")):
        keys += [axis for axis in _axes(pairs) if axis not in keys]
    found = [f"{key}=" for key in keys if key not in pairs and key.startswith(incomplete)]
    bare = [word for word in given if "=" not in word and not word.startswith("-")]
    for position in command.positional[len(bare) :][:1]:
        found = [v for v in _values(command, position, incomplete, pairs) if v.startswith(incomplete)] + found
    return found


def _values(command: Command, name: str, start: str, pairs: dict[str, str]) -> list[str]:
    keys = {key.name: key for key in command.all_keys}
    if name not in keys:
        return _axis_choices(name, pairs) if command.axes else []
    return list(_key_values(keys[name], start, pairs))


def _key_values(key: Key, start: str, pairs: dict[str, str]) -> Iterable[str]:
    if key.complete is not None:
        return key.complete()
    if key.name in ("op", "ops"):
        return op_files()
    if key.name in ("variant", "variants"):
        return dict.fromkeys(name for op in named_ops(_named(pairs)) for name in variant_files(op))
    if key.name == "preset":
        return PRESETS
    if key.name in ("plugin", "path"):
        return _paths(start)
    return ("yes", "no") if key.parse is flag else ()


def _named(pairs: dict[str, str]) -> dict[str, list[str]]:
    """The ops typed so far, those that exist."""
    return {"op": [op for op in (pairs.get("op") or pairs.get("ops") or "").split(",") if op in op_files()]}


def _axes(pairs: dict[str, str]) -> list[str]:
    from workbench.contract import contract

    return list(dict.fromkeys(axis for op in _named(pairs)["op"] for axis in contract(op).axes))


def _axis_choices(name: str, pairs: dict[str, str]) -> list[str]:
    from workbench.contract import contract

    laws = [contract(op) for op in _named(pairs)["op"]]
    return [choice for law in laws if name in law.axes for choice in law.axes[name].choices]


def _paths(start: str) -> list[str]:
    """Folders (with a slash) and Python files that begin with `start`."""
    folder = Path(os.path.dirname(start) or ".")
    head = start[: len(start) - len(os.path.basename(start))]
    try:
        found = sorted(folder.iterdir())
    except OSError:
        return []
    names = (f"{p.name}/" if p.is_dir() else p.name for p in found if p.is_dir() or p.suffix == ".py")
    return [head + name for name in names if not name.startswith(".")]
