"""Weights in a format: what a workload's `format=` names, with exact quantise and dequantise.

| format | values | scales | tensors |
|---|---|---|---|
| bf16 | bfloat16 | none | weight bf16 [N, K] |
| fp8_row | e4m3fn | bf16 a row | weight e4m3fn [N, K], scale bf16 [N, 1] |
| fp8_block | e4m3fn | float32 for 128×128 | weight e4m3fn [N, K], scale float32 [⌈N/128⌉, K/128] |
| w8a16 | int8 symmetric, stored + 128 | bf16 for 128 inputs | packed int32 [N, K/4], scale bf16 [N, K/128] |
| w4a16 | int4 symmetric, stored + 8 | bf16 for 128 inputs | packed int32 [N, K/8], scale bf16 [N, K/128] |
| nvfp4 | e2m1 | e4m3fn for 16 inputs, one float32 | packed uint8 [N, K/2], scale e4m3fn [N, K/16], global_scale [] |

Input k of a packed word lies at bits bits·(k mod per-word), the lowest input lowest (compressed-tensors' order).
The reference of an op runs on the dequantised weights, so a kernel's error is never confused with the format's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from . import grids, layouts
from .numerics import MODEL, Precision

GROUP = 128
"""Inputs that share a scale in w8a16 and w4a16."""
FORMATS = ("bf16", "fp8_row", "fp8_block", "w8a16", "w4a16", "nvfp4")
ACTIVATIONS = ("bf16", "fp8")
"""How inputs reach the product: as they are, or quantised on arrival to e4m3fn (fp8_row, fp8_block only)."""
_INTEGER_BITS = {"w8a16": 8, "w4a16": 4}
_ACTIVATION_GROUP: dict[str, int | None] = {"fp8_row": None, "fp8_block": grids.FP8_BLOCK}


@dataclasses.dataclass(frozen=True)
class Weight:
    """A linear layer's matrix [N, K] (outputs, inputs) in a format.

    `tensors` holds the format's tensors by name (the module's table). `activations` says how the layer's
    inputs are quantised before the product.
    """

    format: str
    shape: tuple[int, int]
    tensors: Mapping[str, Tensor]
    activations: str = "bf16"

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return next(iter(self.tensors.values())).device

    def map(self, function: Callable[[Tensor], Tensor]) -> Weight:
        """Return the weight with `function` (clone, move, …) applied to each tensor."""
        return dataclasses.replace(self, tensors={name: function(t) for name, t in self.tensors.items()})

    def dequantise(self, precision: Precision = MODEL) -> Tensor:
        """See `dequantise`."""
        return dequantise(self, precision)


def quantise(format: str, w: Tensor, activations: str = "bf16") -> Weight:
    """Quantise a matrix [N, K] (bfloat16 or float32) to `format`.

    Raises ValueError for an unknown format, a shape that the format does not divide, or activations that
    it does not take.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is none of {', '.join(FORMATS)}")
    if w.dim() != 2 or 0 in w.shape:
        raise ValueError(f"{format}: a weight has two dimensions [N, K], both above 0, not {list(w.shape)}")
    check_activations(format, activations)
    try:
        tensors = _quantised(format, w)
    except ValueError as error:
        raise ValueError(f"{format}: {error}") from None
    return Weight(format, (w.shape[0], w.shape[1]), tensors, activations)


def check_activations(format: str, activations: str) -> None:
    """Raise ValueError unless `format` takes `activations`."""
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations {activations!r} are none of {', '.join(ACTIVATIONS)}")
    if activations == "fp8" and format not in _ACTIVATION_GROUP:
        raise ValueError(f"activations=fp8 needs format=fp8_row or fp8_block, not {format}")


def _quantised(format: str, w: Tensor) -> dict[str, Tensor]:
    if format == "bf16":
        return {"weight": w.to(torch.bfloat16)}
    if format in _INTEGER_BITS:
        codes = grids.quantise_integer(w, _INTEGER_BITS[format], GROUP)
        return {"packed": layouts.pack_words(codes.codes, codes.bits), "scale": codes.scale}
    if format == "nvfp4":
        nibbles, scale, total = grids.quantise_nvfp4(w)
        return {"packed": layouts.pack_nibbles(nibbles), "scale": scale, "global_scale": total}
    quantise_fp8 = grids.quantise_fp8_rows if format == "fp8_row" else grids.quantise_fp8_blocks
    codes8, scale = quantise_fp8(w)
    return {"weight": codes8, "scale": scale}


def dequantise(weight: Weight, precision: Precision = MODEL) -> Tensor:
    """Matrix [N, K] that `weight` stands for: bfloat16, rounded once (MODEL), or exact in float64 (ORACLE).

    A kernel may round each weight to bfloat16 or keep code and scale apart: the oracle is the exact product, and
    the model's rounding counts as the reference's own error.
    """
    tensors = weight.tensors
    dtype = torch.bfloat16 if precision is MODEL else torch.float64
    if weight.format == "bf16":
        return tensors["weight"].to(dtype)
    if weight.format in _INTEGER_BITS:
        bits = _INTEGER_BITS[weight.format]
        codes = layouts.unpack_words(tensors["packed"], bits)
        return grids.dequantise_integer(grids.IntegerCodes(bits, codes, tensors["scale"]), dtype)
    if weight.format == "nvfp4":
        nibbles = layouts.unpack_nibbles(tensors["packed"])
        return grids.dequantise_nvfp4(nibbles, tensors["scale"], tensors["global_scale"], dtype)
    block = (1, weight.shape[1]) if weight.format == "fp8_row" else (grids.FP8_BLOCK, grids.FP8_BLOCK)
    return grids.dequantise_fp8(tensors["weight"], tensors["scale"], block, dtype)


def activations(x: Tensor, weight: Weight) -> Tensor:
    """What the product sees of inputs [..., K]: `x` itself, or its exact e4m3fn image in float64.

    fp8_row quantises each token with one scale, fp8_block each 128 inputs of a token. This belongs to the
    format, so the oracle does it as well.
    """
    if weight.activations == "bf16":
        return x
    return grids.dequantise_activations(*grids.quantise_activations(x, _ACTIVATION_GROUP[weight.format]))


def stored_bytes(format: str, outputs: int, inputs: int) -> int:
    """Bytes of the tensors of a matrix [outputs, inputs] in `format`, without making it."""
    elements = outputs * inputs
    groups = outputs * -(-inputs // GROUP)
    return {
        "bf16": 2 * elements,
        "fp8_row": elements + 2 * outputs,
        "fp8_block": elements + 4 * -(-outputs // grids.FP8_BLOCK) * -(-inputs // grids.FP8_BLOCK),
        "w8a16": elements + 2 * groups,
        "w4a16": elements // 2 + 2 * groups,
        "nvfp4": elements // 2 + elements // grids.NVFP4_GROUP + 4,
    }[format]
