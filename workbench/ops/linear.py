"""linear: a projection of the model, `x @ weight.T`, with the weight in a format."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from jaxtyping import BFloat16
from torch import Tensor

from reference.formats import ACTIVATIONS, FORMATS, Weight, check_activations, quantise, stored_bytes
from reference.random import normal, stream_key
from workbench.contract import Axis, Contract, Cost, Expected, Output, Tolerance, Workload, workloads
from workbench.errors import UsageError

OP = "linear"
GAP = 64
"""Elements between the rows of a strided view."""

REGIMES = ("ordinary", "large", "tiny", "outliers", "correlated", "strided")
"""What each draws: `large` inputs of about 100; `tiny` 1/100 of the ordinary on both sides; `outliers`
every 37th input 30 times as large, every fifth token and every seventh output 1/16 as large, and 128 inputs of the
first output with weights of zero; `correlated` tokens near one another and weights with a mean, so that sums grow
with K; `strided` rows further apart than they are wide."""


def signature(
    x: BFloat16[Tensor, "tokens k"],
    weight: Weight,
    out: BFloat16[Tensor, "tokens n"],
) -> None:
    """Write `x @ weight.T` to `out`, summed in at least float32 and rounded once to bfloat16.

    `weight` [n, k] is in the workload's format (`reference/formats.py` has the tensors); what it stands for
    is exact, so rounding a dequantised weight to bfloat16 is the kernel's own error, and is allowed. If
    `weight.activations` is `fp8`, each token is quantised to e4m3fn on arrival: with one scale for fp8_row, with
    one for each 128 inputs for fp8_block. Mutated: `out`. Rows of `x` and `out` may be strided.
    """


AXES = {
    "tokens": Axis(1, "tokens of the step or piece", high=1 << 17),
    "n": Axis(4096, "outputs", high=1 << 18),
    "k": Axis(4096, "inputs (a multiple of 128 unless bf16; of 16 for nvfp4)", high=1 << 16),
    "format": Axis("bf16", "how the weight is stored", choices=FORMATS),
    "activations": Axis("bf16", "how inputs reach the product; fp8 with fp8_row and fp8_block", choices=ACTIVATIONS),
}


def draw_inputs(key: tuple[object, ...], regime: str, tokens: int, width: int, device: torch.device) -> Tensor:
    """Inputs [tokens, width] bfloat16 of a regime; `key` names the stream."""
    size = {"large": 100.0, "tiny": 1e-2}.get(regime, 1.0)
    x = normal(stream_key(*key), (tokens, width), scale=size, device=device)
    if regime == "outliers":
        x[:, ::37] *= 30
        x[1::5] *= 2.0**-4
    elif regime == "correlated":
        x = x * 0.25 + normal(stream_key(*key, "shared"), (1, width), offset=0.5, device=device)
    return spaced(x) if regime == "strided" else x


def draw_weight(
    key: tuple[object, ...],
    regime: str,
    shape: tuple[int, int],
    format: str,
    activations: str,
    device: torch.device,
    gain: float = 1.0,
) -> Weight:
    """Weight [n, k] of deviation gain/√k in a format; UsageError where the format can't hold it."""
    size = gain / shape[1] ** 0.5 * {"tiny": 1e-2}.get(regime, 1.0)
    w = normal(stream_key(*key), shape, scale=size, offset=size / 4 if regime == "correlated" else 0.0, device=device)
    if regime == "outliers":
        w[::7] *= 2.0**-4
        w[0, :128] = 0
    try:
        return quantise(format, w, activations)
    except ValueError as mistake:
        raise UsageError(str(mistake)) from None


def spaced(rows: Tensor, gap: int = GAP) -> Tensor:
    """The same [rows, width] values as a view whose rows lie `gap` elements further apart."""
    wide = torch.zeros(rows.shape[0], rows.shape[1] + gap, dtype=rows.dtype, device=rows.device)
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]


def product_rate(activations: str) -> str:
    """Ceiling that a product's FLOPs are held against: fp8 only where both operands are."""
    return "fp8" if activations == "fp8" else "bf16"


def make_inputs(workload: Workload, seed: int, regime: str, device: torch.device) -> dict[str, Any]:
    """Every argument by name."""
    tokens, n, k = workload["tokens"], workload["n"], workload["k"]
    x = draw_inputs((OP, seed, regime, "x"), regime, tokens, k, device)
    format, activations = workload["format"], workload["activations"]
    weight = draw_weight((OP, seed, regime, "weight"), regime, (n, k), format, activations, device)
    out = torch.empty(tokens, n, dtype=torch.bfloat16, device=device)
    return {"x": x, "weight": weight, "out": spaced(out) if regime == "strided" else out}


def reference(law: ModuleType, args: Mapping[str, Any], precision: Any) -> dict[str, Expected]:
    """The law for every token."""
    return {"out": Expected(law.mlp.linear(args["x"], args["weight"], precision))}


def cost(workload: Workload) -> Cost:
    """The weight in its format, the inputs and the outputs once; two FLOPs a weight a token."""
    tokens, n, k = workload["tokens"], workload["n"], workload["k"]
    check(workload)
    read = stored_bytes(workload["format"], n, k) + 2 * tokens * k
    return Cost(2.0 * tokens * n * k, read, 2 * tokens * n, product_rate(workload["activations"]))


def check(workload: Workload) -> None:
    """Raise UsageError where the format does not take the activations."""
    try:
        check_activations(workload["format"], workload["activations"])
    except ValueError as mistake:
        raise UsageError(str(mistake)) from None


QKVZ, QKVG, OUTPUT, HEAD = ({"n": n, "k": 4096} for n in (4 * 4096, 2 * 4096 + 2 * 256, 4096, 73448))
"""The model's projections: lightning q|k|v|z, sparse q|k|v|gate, either's output, and the head (bf16 only)."""
W8A8 = ({"format": "fp8_row", "activations": "fp8"}, {"format": "fp8_block", "activations": "fp8"})
"""Formats with quantised activations."""
LOW_BIT = tuple({"format": f} for f in FORMATS[1:])

PRESETS = {
    "smoke": workloads(
        OP,
        AXES,
        "smoke",
        {"tokens": 1, "n": 200, "k": 384},
        {"tokens": 3, "n": 192, "k": 256, "format": "fp8_row"},
        {"tokens": 63, "n": 136, "k": 256, "format": "fp8_block"},
        {"tokens": 3, "n": 96, "k": 1024, "format": "w8a16"},
        {"tokens": 17, "n": 160, "k": 256, "format": "w4a16"},
        {"tokens": 2, "n": 128, "k": 256, "format": "nvfp4"},
        *({"tokens": 5, "n": 144, "k": 384} | w for w in W8A8),
    ),
    "decode": workloads(
        OP,
        AXES,
        "decode",
        *({"tokens": t} | QKVZ for t in (1, 2, 3, 4, 8, 16, 32, 64, 128)),
        *({"tokens": t} | shape for t in (1, 8, 32) for shape in (QKVG, OUTPUT, HEAD)),
        *({"tokens": t} | QKVZ | f for t in (1, 8, 32) for f in LOW_BIT),
        *({"tokens": t} | QKVZ | w for t in (1, 32) for w in W8A8),
    ),
    "prefill": workloads(
        OP,
        AXES,
        "prefill",
        *({"tokens": t} | QKVZ for t in (1024, 8192, 16384)),
        {"tokens": 8192} | QKVG,
        {"tokens": 8192} | OUTPUT,
        *({"tokens": 8192} | QKVZ | f for f in LOW_BIT),
        *({"tokens": 8192} | QKVZ | w for w in W8A8),
    ),
    "long": workloads(OP, AXES, "long", *({"tokens": t} | QKVG for t in (1, 8192, 16384))),
    "race": workloads(
        OP,
        AXES,
        "race",
        *({"tokens": t} | QKVZ | f for t in (1, 8, 32, 8192) for f in ({"format": "bf16"}, *LOW_BIT, *W8A8)),
    ),
}

CONTRACT = Contract(
    name=OP,
    summary="a projection, with the weight in a format",
    signature=signature,
    axes=AXES,
    outputs={"out": Output(Tolerance.ORACLE)},
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
        *({"tokens": t, "n": 65, "k": 192} for t in (63, 64, 65)),
        {"tokens": 127, "n": 129, "k": 256, "format": "fp8_block"},
        {"tokens": 128, "n": 129, "k": 256, "format": "w8a16"},
        {"tokens": 3, "n": 1024, "k": 128, "format": "w4a16"},
        {"tokens": 1, "n": 64, "k": 4096, "format": "w4a16"},
        {"tokens": 33, "n": 72, "k": 512, "format": "nvfp4"},
        {"tokens": 3, "n": 300, "k": 512, "format": "fp8_block", "activations": "fp8"},
        *({"tokens": t, "n": 16, "k": 64} for t in (8192, 8193)),
    ),
)
