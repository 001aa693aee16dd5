"""fused_mlp through torch.compile: the products are the library's, SiLU times up becomes one kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from variants._dense import Compiled, Dense, compiler_missing, dense, full_sums, multiply
from workbench.contract import Workload
from workbench.variant import variant


def _prepare(workload: Workload, gate_up: Any, down: Any) -> dict[str, Any]:
    return {"gate_up": dense(gate_up), "down": dense(down)}


def _forward(x: Tensor, gate_up: Tensor, down: Tensor, first: int, second: int) -> Tensor:
    gate, up = multiply(x, gate_up, first).chunk(2, -1)
    return multiply(functional.silu(gate) * up, down, second)


_COMPILED = Compiled(_forward)


@variant(supports=compiler_missing, prepare=_prepare)
def compiled(x: Tensor, gate_up: Dense, down: Dense, out: Tensor) -> None:
    """The eager MLP, compiled; any number of tokens, every format as `eager` takes it.

    SiLU, product and (for fp8 activations) quantisation are one kernel between the two products, so what lies
    between them is read and written once. Needs a C++ compiler on the CPU.
    """
    with full_sums():
        out.copy_(_COMPILED(x, gate_up.matrix, down.matrix, gate_up.group, down.group))
