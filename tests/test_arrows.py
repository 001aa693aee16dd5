"""Who may import whom: reference ← workbench ← variants, autotune, profiles, submit; the last four never each other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("reference", "workbench", "variants", "autotune", "profiles", "submit")
OUTER = ROOMS[2:]
LAW_MAY = {"torch", "safetensors"}
"""What the law imports beside the standard library and its own files."""


def imports(path: Path) -> list[tuple[str, bool]]:
    """Top-level names of the modules a file imports; the flag says whether inside a function."""
    tree = ast.parse(path.read_text(), str(path))
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for node in ast.walk(function)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name.split(".")[0], id(node) in inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.append((node.module.split(".")[0], id(node) in inside))
    return found


def broken(room: str, path: Path, name: str, inside: bool) -> bool:
    """Whether a file of `room` may not import `name`."""
    if name not in ROOMS or name == room:
        return False
    if room == "reference":
        return True
    if room == "workbench":
        in_command = path.parent == ROOT / "workbench" / "cli" and inside
        return name in OUTER and not in_command
    return name in OUTER or (room == "variants" and name == "reference")


@pytest.mark.parametrize("room", ROOMS)
def test_arrows(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in (ROOT / room).rglob("*.py")
        for name, inside in imports(path)
        if broken(room, path, name, inside)
    ]
    assert wrong == []


def test_law_needs_nothing_but_torch() -> None:
    import sys

    standard = set(sys.stdlib_module_names)
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in (ROOT / "reference").rglob("*.py")
        for name, _ in imports(path)
        if name not in standard | LAW_MAY
    ]
    assert wrong == []


def test_the_rule_itself(tmp_path: Path) -> None:
    command, other = ROOT / "workbench" / "cli" / "x.py", ROOT / "workbench" / "x.py"
    assert not broken("workbench", command, "variants", True)
    assert broken("workbench", command, "variants", False)
    assert broken("workbench", other, "submit", True)
    assert broken("variants", other, "autotune", False)
    assert broken("variants", other, "reference", False)
    assert broken("reference", other, "workbench", False)
    assert not broken("submit", other, "workbench", False)
    file = tmp_path / "x.py"
    file.write_text("import reference.norms\ndef f():\n    from variants import a\nfrom . import b\n")
    assert sorted(imports(file)) == [("reference", False), ("variants", True)]


def test_no_file_of_the_rooms_is_too_long() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {count}"
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if (count := len(path.read_text().splitlines())) > 400
    ]
    assert long == []
