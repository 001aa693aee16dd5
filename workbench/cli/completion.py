"""`workbench completion`: the script that teaches a shell to complete commands, keys, ops and variants."""

from __future__ import annotations

from workbench.command import Command, Key, Reply, Request, one_of
from workbench.completion import SCRIPTS


def _run(request: Request) -> Reply:
    shell = request["shell"]
    script = SCRIPTS[shell]
    return Reply({"shell": shell, "script": script}, [script.rstrip("\n")])


COMMAND = Command(
    name="completion",
    summary="Print the script that completes commands, keys, ops and variants in your shell.",
    keys=(Key("shell", one_of(SCRIPTS), "bash, zsh or fish", required=True, complete=lambda: SCRIPTS),),
    run=_run,
    examples=(
        'eval "$(workbench completion shell=bash)"     # in ~/.bashrc',
        'eval "$(workbench completion shell=zsh)"      # in ~/.zshrc',
        "workbench completion shell=fish > ~/.config/fish/completions/workbench.fish",
    ),
)
