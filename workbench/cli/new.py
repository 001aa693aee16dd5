"""`workbench new`: write the file of a new variant."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from workbench.command import Command, Key, Reply, Request, one_of, op
from workbench.errors import UsageError

_KINDS = ("torch", "triton")


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", text) or keyword.iskeyword(text):
        raise UsageError("a variant's name is a lower-case Python name, as triton_split_kv")
    return text


def _run(request: Request) -> Reply:
    from workbench import scaffold
    from workbench.contract import contract
    from workbench.registry import entries, find

    law = contract(request["op"])
    name, path = request["name"], request["path"]
    if name in [entry.name for entry in entries(law.name)]:
        raise UsageError(f"{law.name} already has a variant {name!r}; choose another name")
    target = Path(path).expanduser() if path else _folder(law.name) / f"{name}.py"
    outside = path is not None
    if target.suffix != ".py":
        raise UsageError(f"path={path}: a variant's file ends in .py")
    if target.exists():
        raise UsageError(f"{target} exists; nothing is overwritten")
    if request["like"]:
        original = find(law.name, request["like"])
        text = scaffold.copy(law, name, original.name, original.path.read_text(), outside=outside)
    else:
        text = scaffold.skeleton(law, name, request["kind"], outside=outside)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    plugins = [str(target)] if outside else []
    try:
        entry = next(entry for entry in entries(law.name, plugins) if entry.name == name)
    except Exception:
        target.unlink()
        raise
    if entry.reason is not None and not entry.reason.startswith("needs the package"):
        target.unlink()
        raise UsageError(f"the new file would not fit: {entry.reason}")
    where = f"op={law.name} variant={name}" + (f" plugin={target}" if outside else "")
    steps = [f"workbench check {where}", f"workbench bench op={law.name}" + (f" plugin={target}" if outside else "")]
    state = f"a copy of {request['like']}" if request["like"] else "raises NotImplementedError until it is written"
    text_lines = [f"wrote {_short(target)} ({state})", "edit it, then:", *(f"  {step}" for step in steps)]
    return Reply({"op": law.name, "variant": name, "file": str(target), "next": steps}, ["\n".join(text_lines)])


def _folder(op_name: str) -> Path:
    """Where the op's variants lie, in a checkout; UsageError where only an installed package is found."""
    from workbench.registry import folders

    for place in folders():
        if (place.parent / "pyproject.toml").is_file():
            return place / op_name
    raise UsageError("the workbench is installed, not checked out: say path=FILE.py where the variant shall lie")


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


COMMAND = Command(
    name="new",
    summary="Write the file of a new variant, with the contract's arguments, ready to edit.",
    keys=(
        Key("op", op, "the op it implements", required=True),
        Key("name", _name, "its name, and its file's", required=True),
        Key(
            "kind", one_of(_KINDS), "torch, or triton with a kernel's outline", default="torch", complete=lambda: _KINDS
        ),
        Key("like", str, "a variant to start from: its file, copied and renamed"),
        Key("path", str, "where to write it instead of variants/<op>/; then it is a plug-in (plugin=…)"),
    ),
    run=_run,
    examples=(
        "workbench new op=lightning_decode name=mine",
        "workbench new op=lightning_decode name=triton_mine kind=triton",
        "workbench new op=lightning_decode name=eager_mine like=eager",
        "workbench new op=lightning_decode name=mine path=~/kernels/mine.py",
    ),
    description="The skeleton passes the registry's check and raises NotImplementedError until it is written, so that\n"
    "`workbench check` fails it. Nothing is ever overwritten.",
)
