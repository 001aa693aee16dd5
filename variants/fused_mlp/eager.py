"""fused_mlp in three torch calls: product, SiLU times up, product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from variants._dense import Dense, dense, full_sums, multiply
from workbench.contract import Workload
from workbench.variant import variant


def _prepare(workload: Workload, gate_up: Any, down: Any) -> dict[str, Any]:
    return {"gate_up": dense(gate_up), "down": dense(down)}


@variant(prepare=_prepare)
def eager(x: Tensor, gate_up: Dense, down: Dense, out: Tensor) -> None:
    """Two matrix products on weights dequantised to bfloat16 at load; SiLU and the product between them in torch.

    Any number of tokens and every format; with fp8 activations the products are float32, exact and several times
    slower. What lies between the products goes through memory three times.
    """
    with full_sums():
        gate, up = multiply(x, gate_up.matrix, gate_up.group).chunk(2, -1)
        inner = functional.silu(gate).mul_(up)
        if down.group:
            out.copy_(multiply(inner, down.matrix, down.group))
        else:
            torch.mm(inner, down.matrix.T, out=out)
