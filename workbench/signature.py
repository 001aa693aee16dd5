"""Whether a variant's function fits its op's contract: checked when it is loaded, before anything runs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

from workbench.contract import Contract
from workbench.errors import nearest
from workbench.variant import PLACES, Declaration

_CONDITION = re.compile(r"(>=|<=|==|>|<)sm_(\d+)[a-z]?")


class Unfit(Exception):
    """A variant can't be used as it is written; the message names function and argument."""


def check_signature(function: Callable[..., None], law: Contract) -> None:
    """Hold a declared function's arguments, tunables and declaration against its contract.

    Raises Unfit, naming the function and the argument.
    """
    name = function.__name__
    declaration: Declaration = function.workbench_variant  # type: ignore[attr-defined]
    expected = list(inspect.signature(law.signature).parameters)
    actual = inspect.signature(function).parameters
    plain: list[inspect.Parameter] = []
    keywords: list[inspect.Parameter] = []
    for parameter in actual.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise Unfit(f"{name}() takes {str(parameter)!r}; every argument must be spelled out")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise Unfit(f"{name}(): argument {parameter.name!r} is positional-only; all are given by name")
        is_keyword = parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in expected
        (keywords if is_keyword else plain).append(parameter)
    names = [parameter.name for parameter in plain]
    for argument in expected:
        if argument not in names:
            raise Unfit(f"{name}(): argument {argument!r} of {law.name} is missing")
    for argument in names:
        if argument in declaration.tunables:
            raise Unfit(f"{name}(): tunable {argument!r} must be keyword-only (after '*')")
        if argument not in expected:
            raise Unfit(f"{name}(): {law.name} has no argument {argument!r}; {nearest(argument, expected)}")
    for argument, right in zip(names, expected):
        if argument != right:
            raise Unfit(f"{name}(): argument {argument!r} stands where {law.name} has {right!r}")
    for parameter in keywords:
        if parameter.name not in declaration.tunables:
            known = [*expected, *declaration.tunables]
            raise Unfit(
                f"{name}(): {parameter.name!r} is neither an argument of {law.name} nor among the tunables"
                f" of @variant; {nearest(parameter.name, known)}"
            )
        if parameter.default is parameter.empty:
            raise Unfit(f"{name}(): tunable {parameter.name!r} has no default")
        if parameter.default not in declaration.tunables[parameter.name]:
            choices = ", ".join(map(str, declaration.tunables[parameter.name]))
            raise Unfit(f"{name}(): default {parameter.name}={parameter.default} is not among its choices {choices}")
    for tunable in declaration.tunables:
        if tunable not in actual:
            raise Unfit(f"{name}(): tunable {tunable!r} of @variant is not among the arguments")
    for where in declaration.runs_on:
        if where not in PLACES:
            raise Unfit(f"{name}(): runs_on={where!r}; {nearest(where, PLACES)}")
    if not declaration.runs_on:
        raise Unfit(f"{name}(): runs_on is empty")
    if declaration.arch:
        try:
            satisfies(declaration.arch, 0)
        except ValueError as mistake:
            raise Unfit(f"{name}(): {mistake}") from None


def satisfies(condition: str, capability: int) -> bool:
    """Whether a compute capability (90 for sm_90) meets `>=sm_80,<sm_120`: every part, separated by commas.

    Raises ValueError if the condition can't be read.
    """
    compare: dict[str, Callable[[int, int], bool]] = {
        ">=": int.__ge__,
        "<=": int.__le__,
        "==": int.__eq__,
        ">": int.__gt__,
        "<": int.__lt__,
    }
    for part in condition.split(","):
        match = _CONDITION.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"architecture {part.strip()!r} is not like '>=sm_80'")
        if not compare[match[1]](capability, int(match[2])):
            return False
    return True
