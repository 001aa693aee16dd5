"""linear through torch.compile: the product is the library's, what quantises its inputs becomes one kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from variants._dense import Compiled, Dense, compiler_missing, dense, full_sums, multiply
from workbench.contract import Workload
from workbench.variant import variant


def _prepare(workload: Workload, weight: Any) -> dict[str, Any]:
    return {"weight": dense(weight)}


def _forward(x: Tensor, matrix: Tensor, group: int) -> Tensor:
    return multiply(x, matrix, group)


_COMPILED = Compiled(_forward)


@variant(supports=compiler_missing, prepare=_prepare)
def compiled(x: Tensor, weight: Dense, out: Tensor) -> None:
    """The eager product, compiled; any number of tokens, every format as `eager` takes it.

    With bfloat16 activations nothing is left to fuse, and it should equal `eager` but for a copy; fp8 activations
    are quantised in one kernel instead of eight. Needs a C++ compiler on the CPU.
    """
    with full_sums():
        out.copy_(_COMPILED(x, weight.matrix, weight.group))
