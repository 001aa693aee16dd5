"""The text of a new variant's file: a skeleton that fits its contract and fails until it is written, or a copy."""

from __future__ import annotations

import inspect
import re

from workbench.contract import Contract
from workbench.errors import UsageError

KINDS = ("torch", "triton")

_TORCH = '''\
"""{title}."""

from __future__ import annotations

{imports}


{decorator}
def {name}(
{parameters}
) -> None:
    """{title}.

    Args:
{documented}
    """
    raise NotImplementedError("{name} is not written yet")
'''

_TRITON = '''\
"""{title}, in Triton."""

from __future__ import annotations

{imports}


@triton.jit
def _kernel(x, out, width, x_stride, out_stride, BLOCK: tl.constexpr):
    """Copy a row: the shape of a kernel, to be replaced by the op."""
    row = tl.program_id(0).to(tl.int64)  # 64-bit, so that row * stride can't overflow
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * x_stride + columns, inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, values, inside)


{decorator}
def {name}(
{parameters}
    *,
    block: int = 128,
    num_warps: int = 4,
) -> None:
    """{title}.

    A launch looks like `_kernel[(rows,)](x, out, width, x.stride(0), out.stride(0), BLOCK=block, num_warps=num_warps)`.

    Args:
{documented}
        block: channels that a program takes.
        num_warps: warps of a program.
    """
    raise NotImplementedError("{name} is not written yet")
'''


def skeleton(law: Contract, name: str, kind: str, *, outside: bool) -> str:
    """A file with the contract's arguments, ready to edit; until then calling it raises NotImplementedError.

    `kind` is one of KINDS. `outside` the folder `variants/<op>/` the decorator has to name the op.
    """
    arguments = list(inspect.signature(law.signature).parameters.values())
    types = {argument.name: _type(argument) for argument in arguments}
    used = set(types.values())
    imports = ["from typing import Any", ""] if "Any" in used else []
    imports += ["import triton", "import triton.language as tl"] if kind == "triton" else []
    imports += ["from torch import Tensor"] if "Tensor" in used else []
    imports += ["", "from workbench.variant import variant"]
    declared = [f'op="{law.name}"'] if outside else []
    if kind == "triton":
        declared += [
            'requires=("triton",)',
            'runs_on=("cuda", "interpreter")',
            'tunables={"block": (64, 128, 256), "num_warps": (2, 4, 8)}',
        ]
    decorator = f"@variant({', '.join(declared)})"
    if len(decorator) > 100:
        decorator = "@variant(\n" + "".join(f"    {item},\n" for item in declared) + ")"
    return (_TRITON if kind == "triton" else _TORCH).format(
        title=f"{law.name}: say here in a line what this variant does differently",
        name=name,
        imports="\n".join(imports),
        decorator=decorator,
        parameters="\n".join(f"    {argument}: {kind_}," for argument, kind_ in types.items()),
        documented="\n".join(f"        {argument.name}: {_described(law, argument)}" for argument in arguments),
    )


def copy(law: Contract, name: str, like: str, source: str, *, outside: bool) -> str:
    """The file of the variant `like` under a new name.

    Raises UsageError if its function isn't found in the source.
    """
    text, found = re.subn(rf"^def {re.escape(like)}\(", f"def {name}(", source, flags=re.MULTILINE)
    if found != 1:
        raise UsageError(f"like={like}: its file has no plain `def {like}(` to rename")
    if outside:
        text = re.sub(r"^@variant\(\s*", f'@variant(op="{law.name}", ', text, count=1, flags=re.MULTILINE)
        text = text.replace(f'@variant(op="{law.name}", )', f'@variant(op="{law.name}")')
    return text


def _annotation(argument: inspect.Parameter) -> str:
    annotation = argument.annotation
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _type(argument: inspect.Parameter) -> str:
    text = _annotation(argument)
    if "[Tensor" in text:
        return "Tensor"
    return text if text in ("int", "float", "bool") else "Any"


def _described(law: Contract, argument: inspect.Parameter) -> str:
    text = re.sub(r"^(\w+)\[Tensor, ['\"](.*)['\"]\]$", r"\1 [\2]", _annotation(argument))
    if argument.name not in law.outputs:
        return f"{text}."
    return f"{text}, {'updated in place' if law.outputs[argument.name].inout else 'written'}."
