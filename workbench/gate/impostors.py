"""Outputs that look like an answer and are none: they must fail on every workload of every op.

Each is made from the law's own answer, so that shape, size and spread are right, and is written to one output
while the others are answered rightly. A tolerance that lets one of them pass is a fault of the gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.contract import Contract, Expected
from workbench.gate.arena import bits
from workbench.gate.mutation import of_function, write
from workbench.variant import Variant

IMPOSTORS = ("zeros", "constant", "mean", "shuffled", "stale")


def forge(kind: str, rows: Tensor, other: Tensor) -> Tensor:
    """An impostor of the rows that the law touches, with their shape and dtype.

    `zeros`; `constant`, the largest element everywhere; `mean`, their mean everywhere; `shuffled`, each row in
    the place of the next (the elements, where there is one row); `stale`, the rows `other` of another call.
    """
    if kind == "stale":
        return other
    if kind == "zeros" or not rows.numel():
        return torch.zeros_like(rows)
    if kind == "shuffled":
        return rows.roll(1, 0) if len(rows) > 1 else rows.reshape(-1).roll(1).reshape(rows.shape)
    flat = rows.reshape(-1)
    finite = flat.double().nan_to_num(0.0, 0.0, 0.0)
    if kind == "constant":
        return flat[int(finite.abs().argmax())].expand(rows.shape).clone()
    mean = finite.mean()
    return (mean if rows.is_floating_point() else mean.round()).to(rows.dtype).expand(rows.shape).clone()


def impostor(
    contract: Contract, kind: str, output: str, right: Mapping[str, Expected], other: Mapping[str, Expected]
) -> Variant | None:
    """A variant that answers rightly but for one output, which holds the impostor; None where it would be right.

    `right` is the law's answer for the inputs it will be called with, `other` for other contents of them. It is
    right where the output has one element and is shuffled, or where the law's answers happen to agree.
    """
    expected = right[output]
    dtype = expected.value.dtype
    if expected.touched is None:
        rows, stale = expected.value, other[output].value
    else:
        places = expected.touched.nonzero(as_tuple=True)
        rows, stale = expected.value[places], other[output].value[places]
    if stale.shape != rows.shape:
        return None
    forged = forge(kind, rows, stale.to(dtype))
    if bool((bits(forged.contiguous()) == bits(rows.contiguous())).all()):
        return None
    value = forged
    if expected.touched is not None:
        value = expected.value.clone()
        value[places] = forged

    def function(**args: Any) -> None:
        for name, answer in right.items():
            write(args[name], value if name == output else answer.value, answer.touched)

    return of_function(contract, function, f"{kind}({output})")
