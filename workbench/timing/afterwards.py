"""Judging what a timed call left behind: the gate's own rules on the outputs of a sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from workbench.contract import Contract
from workbench.gate.answers import Answers
from workbench.gate.arena import bits, walk
from workbench.gate.judge import judge as judge_output


def judge(law: Contract, left: Mapping[str, Any], found: Mapping[str, Any], device: torch.device) -> str | None:
    """Hold the arguments as a timed call left them (`left`) against the law for what it found (`found`).

    None if all is right, else a sentence. Raises `gate.answers.ReferenceBroke` if the law fails.
    """
    return changed_input(law, left, found) or wrong_output(law, left, found, device)


def changed_input(law: Contract, left: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """An input that a timed call wrote to, in a sentence. Weights may have been repacked, so they are not looked at."""
    for name, value in found.items():
        if name in law.outputs or name in law.weights:
            continue
        for (path, before), (_, after) in zip(walk(value, name), walk(left[name], name)):
            if not torch.equal(bits(before), bits(after)):
                return f"a timed call changed its input {path}"
    return None


def wrong_output(law: Contract, left: Mapping[str, Any], found: Mapping[str, Any], device: torch.device) -> str | None:
    """An output of a timed call that is wrong, in a sentence; see `judge`."""
    model, oracle = Answers(law, device).evaluate(found, "a timed call")
    for name, rule in law.outputs.items():
        verdict = judge_output(rule, left[name], found[name], model[name], oracle.get(name))
        if verdict.kind is not None:
            return f"output {name} of a timed call: {verdict.kind.value}, {verdict.detail}"
    return None
