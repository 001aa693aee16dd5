"""fused_mlp: a layer's whole MLP, `down(silu(gate(x))·up(x))`, with the weights in a format."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from jaxtyping import BFloat16
from torch import Tensor

from reference.formats import ACTIVATIONS, FORMATS, Weight, stored_bytes
from workbench.contract import Axis, Contract, Cost, Expected, Output, Tolerance, Workload, workloads
from workbench.errors import UsageError
from workbench.ops.linear import LOW_BIT, W8A8, check, draw_inputs, draw_weight, product_rate, spaced

OP = "fused_mlp"
LEAST_QUANTISED = 8192
"""Fewest channels between the projections, over all tokens, with fp8 activations. A last bit in the product turns some
3 % of its e4m3 codes into their neighbours, 6 to 12 % away, in the law's own roundings as in any kernel's; what a
kernel may err is measured by the law's error, and with fewer channels a handful of codes would decide that."""

USUAL_ERROR = 0.0035
"""Relative error allowed in any case: the law's five roundings leave 0.0038 (the median over seeds). With one token and
few channels a seed's own roundings may cancel down to 0.0022, which says nothing about what a kernel may err."""

REGIMES = ("ordinary", "large", "tiny", "outliers", "correlated", "strided")
"""As `linear`'s; `large` also saturates the gate, whose exponential overflows float32 if taken carelessly."""


def signature(
    x: BFloat16[Tensor, "tokens hidden"],
    gate_up: Weight,
    down: Weight,
    out: BFloat16[Tensor, "tokens hidden"],
) -> None:
    """Write `down(silu(gate)·up)` to `out`, with `gate | up = x @ gate_up.T`.

    `gate_up` [2·intermediate, hidden] holds the gate's rows before the up projection's, `down` is [hidden,
    intermediate]; both are in the workload's format, with `linear`'s rules. Sums are at least float32. The law
    rounds gate, up, silu(gate), the product and the result to bfloat16; rounding less often is allowed. With
    fp8 activations both `x` and the product are quantised. Mutated: `out`. Rows may be strided.
    """


AXES = {
    "tokens": Axis(1, "tokens of the step or piece", high=1 << 17),
    "hidden": Axis(4096, "channels in and out (a multiple of 128 unless bf16)", high=1 << 15),
    "intermediate": Axis(16384, "channels between (a multiple of 128 unless bf16)", high=1 << 17),
    "format": Axis("bf16", "how the weights are stored", choices=FORMATS),
    "activations": Axis("bf16", "how inputs reach a product; fp8 with fp8_row and fp8_block", choices=ACTIVATIONS),
}


def make_inputs(workload: Workload, seed: int, regime: str, device: torch.device) -> dict[str, Any]:
    """Every argument by name; gate and up are of the size of `x`."""
    tokens, hidden, inner = workload["tokens"], workload["hidden"], workload["intermediate"]
    _check(workload)
    stored = (workload["format"], workload["activations"], device)
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=device)
    return {
        "x": draw_inputs((OP, seed, regime, "x"), regime, tokens, hidden, device),
        "gate_up": draw_weight((OP, seed, regime, "gate_up"), regime, (2 * inner, hidden), *stored),
        "down": draw_weight((OP, seed, regime, "down"), regime, (hidden, inner), *stored),
        "out": spaced(out) if regime == "strided" else out,
    }


def _check(workload: Workload) -> None:
    """Raise UsageError where the format does not take the activations, or too few channels are quantised to judge."""
    check(workload)
    channels = workload["tokens"] * workload["intermediate"]
    if workload["activations"] == "fp8" and channels < LEAST_QUANTISED:
        raise UsageError(f"activations=fp8 needs {LEAST_QUANTISED} or more tokens × intermediate, got {channels}")


def reference(law: ModuleType, args: Mapping[str, Any], precision: Any) -> dict[str, Expected]:
    """The law for every token."""
    return {"out": Expected(law.mlp.mlp(args["x"], args["gate_up"], args["down"], precision))}


def cost(workload: Workload) -> Cost:
    """Both weights in their format, `x` and `out` once (what lies between need not leave the chip)."""
    tokens, hidden, inner = workload["tokens"], workload["hidden"], workload["intermediate"]
    _check(workload)
    weights = stored_bytes(workload["format"], 2 * inner, hidden) + stored_bytes(workload["format"], hidden, inner)
    row = 2 * tokens * hidden
    return Cost(6.0 * tokens * hidden * inner, weights + row, row, product_rate(workload["activations"]))


PRESETS = {
    "smoke": workloads(
        OP,
        AXES,
        "smoke",
        {"tokens": 1, "hidden": 96, "intermediate": 160},
        {"tokens": 63, "hidden": 128, "intermediate": 192},
        {"tokens": 3, "hidden": 128, "intermediate": 256, "format": "fp8_row"},
        {"tokens": 2, "hidden": 256, "intermediate": 128, "format": "fp8_block"},
        {"tokens": 3, "hidden": 128, "intermediate": 256, "format": "w8a16"},
        {"tokens": 17, "hidden": 128, "intermediate": 256, "format": "w4a16"},
        {"tokens": 3, "hidden": 128, "intermediate": 256, "format": "nvfp4"},
        *({"tokens": 9, "hidden": 128, "intermediate": 2048} | w for w in W8A8),
    ),
    "decode": workloads(
        OP,
        AXES,
        "decode",
        *({"tokens": t} for t in (1, 2, 3, 4, 8, 16, 32, 64, 128)),
        *({"tokens": t} | f for t in (1, 8, 32) for f in LOW_BIT),
        *({"tokens": t} | w for t in (1, 32) for w in W8A8),
    ),
    "prefill": workloads(
        OP,
        AXES,
        "prefill",
        *({"tokens": t} for t in (1024, 8192, 16384)),
        *({"tokens": 8192} | f for f in LOW_BIT),
        *({"tokens": 8192} | w for w in W8A8),
    ),
    "long": workloads(OP, AXES, "long", *({"tokens": t} for t in (1, 8192, 16384))),
    "race": workloads(
        OP,
        AXES,
        "race",
        *({"tokens": t} | f for t in (1, 8, 32, 8192) for f in ({"format": "bf16"}, *LOW_BIT, *W8A8)),
    ),
}

CONTRACT = Contract(
    name=OP,
    summary="the MLP of a layer: gate and up projections, SiLU, down projection",
    signature=signature,
    axes=AXES,
    outputs={"out": Output(Tolerance.ORACLE, floor=USUAL_ERROR)},
    make_inputs=make_inputs,
    reference=reference,
    cost=cost,
    presets=PRESETS,
    regimes=REGIMES,
    weights=("gate_up", "down"),
    gate_workloads=workloads(
        OP,
        AXES,
        "gate",
        *({"tokens": t, "hidden": 64, "intermediate": 72} for t in (63, 64, 65)),
        {"tokens": 127, "hidden": 128, "intermediate": 128, "format": "w4a16"},
        {"tokens": 128, "hidden": 128, "intermediate": 1024, "format": "fp8_row", "activations": "fp8"},
        {"tokens": 3, "hidden": 128, "intermediate": 512, "format": "w4a16"},
        {"tokens": 4, "hidden": 256, "intermediate": 384, "format": "fp8_block"},
        {"tokens": 1, "hidden": 64, "intermediate": 4096},
        *({"tokens": t, "hidden": 16, "intermediate": 24} for t in (8192, 8193)),
    ),
)
