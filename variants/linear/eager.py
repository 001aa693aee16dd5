"""linear with torch's own product: what a server does that has no kernel for the format."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from variants._dense import Dense, dense, full_sums, multiply
from workbench.contract import Workload
from workbench.variant import variant


def _prepare(workload: Workload, weight: Any) -> dict[str, Any]:
    return {"weight": dense(weight)}


@variant(prepare=_prepare)
def eager(x: Tensor, weight: Dense, out: Tensor) -> None:
    """One matrix product (cuBLAS on a GPU, oneDNN on a CPU) on weights dequantised to bfloat16 at load.

    Any number of tokens and every format; a low-bit weight is read as bfloat16, so it gains nothing here. With fp8
    activations, quantised at every call, the product is float32: exact, and several times slower.
    """
    with full_sums():
        if weight.group:
            out.copy_(multiply(x, weight.matrix, weight.group))
        else:
            torch.mm(x, weight.matrix.T, out=out)
