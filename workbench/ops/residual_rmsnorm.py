"""residual_rmsnorm: a branch scaled and added to the residual stream, and the norm the next layer reads."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from jaxtyping import BFloat16
from torch import Tensor

from reference.random import normal, stream_key
from workbench.contract import Axis, Contract, Cost, Expected, Output, Tolerance, Workload, workloads

OP = "residual_rmsnorm"
EPS = 1e-6
SCALE = 1.4 / 32**0.5
"""scale_depth / √layers of the released model."""
REFERENCE_ELEMENTS = 1 << 24
"""Elements the reference takes at once: each costs some 60 bytes of scratch."""

REGIMES = ("ordinary", "tiny", "large", "outliers", "cancelling", "strided")
"""What each draws: `tiny` values of about 1/1000, whose mean square is as small as eps; `large` ones of about 3000;
`outliers` one channel of each row, at its end, its beginning or its middle, a thousand times the others, as trained
models have them; `cancelling` a residual that the scaled branch takes away, so that the branch's own rounding
is most of what remains; `strided` rows further apart than they are wide, with NaN between them."""


def signature(
    branch: BFloat16[Tensor, "tokens hidden"],
    residual: BFloat16[Tensor, "tokens hidden"],
    weight: BFloat16[Tensor, "hidden"],
    out: BFloat16[Tensor, "tokens hidden"],
    scale: float,
) -> None:
    """Add a branch to the residual stream and norm the sum.

    residual ← bf(residual + bf(branch·scale)), the factor being rounded to float32; then, with x the new residual,
    out = bf(bf(x · rsqrt(mean(x²) + 1e-6)) · weight), mean over a row's channels, in float32.

    Mutated: `residual` (to the bit), `out`. The rows of `branch`, `residual` and `out` may be strided.
    """


AXES = {
    "tokens": Axis(8, "rows: sequences in decode, tokens of a piece in prefill", high=16384),
    "hidden": Axis(4096, "channels of a row", low=32, high=16384),
}


def make_inputs(workload: Workload, seed: int, regime: str, device: torch.device) -> dict[str, Any]:
    """Every argument by name."""
    shape = workload["tokens"], workload["hidden"]
    size = {"tiny": 1e-3, "large": 3e3}.get(regime, 1.5)

    def draw(name: str, scale: float) -> Tensor:
        return normal(stream_key(OP, seed, regime, name), shape, scale=scale, device=device)

    # A branch's deviation times the factor is about half the residual's, so that either one left out shows.
    branch, residual = draw("branch", 2 * size), draw("residual", size)
    if regime == "outliers":
        rows = torch.arange(shape[0], device=device)
        places = torch.tensor([shape[1] - 1, 0, shape[1] // 2], device=device)[rows % 3]
        residual[rows, places] = residual[rows, places] * 1000
    elif regime == "cancelling":
        residual = (branch.float() * -SCALE + 0.01 * residual.float()).to(torch.bfloat16)
    weight = normal(stream_key(OP, seed, regime, "weight"), shape[1:], scale=0.3, offset=1.0, device=device)
    out = torch.empty_like(residual)
    if regime == "strided":
        branch, residual, out = (_strided(tensor, gap) for tensor, gap in ((branch, 64), (residual, 8), (out, 128)))
    return {"branch": branch, "residual": residual, "weight": weight, "out": out, "scale": SCALE}


def _strided(tensor: Tensor, gap: int) -> Tensor:
    """The same rows, `gap` elements of NaN apart."""
    wide = torch.full((tensor.shape[0], tensor.shape[1] + gap), torch.nan, dtype=tensor.dtype, device=tensor.device)
    view = wide[:, : tensor.shape[1]]
    view.copy_(tensor)
    return view


def reference(law: ModuleType, args: Mapping[str, Any], precision: Any) -> dict[str, Expected]:
    """The law, some rows at a time."""
    branch, residual, weight, scale = (args[name] for name in ("branch", "residual", "weight", "scale"))
    rows = max(1, REFERENCE_ELEMENTS // branch.shape[1])
    sums, outs = [], []
    for start in range(0, branch.shape[0], rows):
        part = slice(start, start + rows)
        sums.append(law.norms.residual_add(residual[part], branch[part], scale, precision))
        outs.append(law.norms.rms_norm(sums[-1], weight, EPS, precision))
    return {"residual": Expected(torch.cat(sums)), "out": Expected(torch.cat(outs))}


def cost(workload: Workload) -> Cost:
    """Two tensors read and two written; there are no matrix products."""
    row = 2 * workload["hidden"]
    moved = 2 * workload["tokens"] * row
    return Cost(0.0, moved + row, moved)


PRESETS = {
    "smoke": workloads(
        OP,
        AXES,
        "smoke",
        {"tokens": 1, "hidden": 4096},
        {"tokens": 3, "hidden": 4096},
        {"tokens": 63, "hidden": 1024},
        {"tokens": 128, "hidden": 384},
    ),
    "decode": workloads(OP, AXES, "decode", *({"tokens": b} for b in (1, 8, 32, 128))),
    "prefill": workloads(OP, AXES, "prefill", *({"tokens": t} for t in (512, 2048, 8192, 16384))),
    "long": workloads(OP, AXES, "long", {"tokens": 1}, {"tokens": 8192}, {"tokens": 16384}),
    "race": workloads(OP, AXES, "race", *({"tokens": t} for t in (1, 8, 32, 64, 8192))),
}

CONTRACT = Contract(
    name=OP,
    summary="scaled residual addition, and the norm of the sum",
    signature=signature,
    axes=AXES,
    outputs={
        "residual": Output(Tolerance.BITWISE, inout=True),
        "out": Output(Tolerance.ORACLE),
    },
    make_inputs=make_inputs,
    reference=reference,
    cost=cost,
    presets=PRESETS,
    regimes=REGIMES,
    weights=("weight",),
    gate_workloads=workloads(
        OP,
        AXES,
        "gate",
        *({"tokens": t, "hidden": 256} for t in (63, 64, 65, 127, 128)),
        *({"tokens": 3, "hidden": h} for h in (96, 4097)),
        {"tokens": 2, "hidden": 16384},
        *({"tokens": t, "hidden": 32} for t in (8192, 8193)),
    ),
)
