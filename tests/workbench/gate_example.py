"""A small contract for tests of the gate: an RMSNorm whose inputs are also added up in slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from reference.random import normal, stream_key
from workbench.contract import Axis, Contract, Cost, Expected, Output, Tolerance, Workload
from workbench.variant import Variant

EPS = 1e-6
AXES = {"batch": Axis(4, "rows", high=128), "context": Axis(64, "a length without effect", high=1 << 20)}


def signature(x: Tensor, weight: Tensor, slots: Tensor, total: Tensor, out: Tensor) -> None:
    """See the module."""


def make_inputs(workload: Workload, seed: int, regime: str, device: torch.device) -> dict[str, Any]:
    batch, width = workload["batch"], 64
    key = (workload.op, seed, regime)
    scale = {"large": 1e4, "tiny": 1e-3}.get(regime, 1.0)
    wide = torch.zeros(batch, width + 16, dtype=torch.bfloat16, device=device)
    x = wide[:, :width] if regime == "strided" else torch.empty(batch, width, dtype=torch.bfloat16, device=device)
    x.copy_(normal(stream_key(*key, "x"), (batch, width), scale=scale, device=device))
    slots = torch.arange(batch, dtype=torch.int32, device=device).flip(0).contiguous()
    if regime == "padded":
        slots[1::2] = -1
    out = torch.empty(batch, 2 * width, dtype=torch.bfloat16, device=device)[:, :width]
    return {
        "x": x,
        "weight": normal(stream_key(*key, "weight"), (width,), scale=0.25, offset=1.0, device=device),
        "slots": slots,
        "total": normal(stream_key(*key, "total"), (batch + 2, width), dtype=torch.float32, device=device),
        "out": out if regime == "strided" else torch.empty(batch, width, dtype=torch.bfloat16, device=device),
    }


def reference(law: ModuleType, args: Mapping[str, Any], precision: Any) -> dict[str, Expected]:
    oracle = precision is law.numerics.ORACLE
    slots = args["slots"].long()
    live = slots >= 0
    total = args["total"].to(torch.float64 if oracle else torch.float32, copy=True)
    total[slots[live]] += args["x"][live].to(total.dtype)
    touched = torch.zeros(len(total), dtype=torch.bool, device=slots.device)
    touched[slots[live]] = True
    out = law.norms.rms_norm(args["x"], args["weight"], EPS, precision)
    return {"total": Expected(total, touched), "out": Expected(out, live)}


def contract(**fields: Any) -> Contract:
    """The contract; `fields` replace some of its own."""
    own: dict[str, Any] = {
        "name": "example",
        "summary": "an example",
        "signature": signature,
        "axes": AXES,
        "outputs": {"total": Output(Tolerance.BITWISE, inout=True), "out": Output(Tolerance.ORACLE)},
        "make_inputs": make_inputs,
        "reference": reference,
        "cost": lambda workload: Cost(1.0, workload["batch"], 1),
        "presets": {"smoke": (workload(batch=4), workload(batch=2, context=63))},
        "regimes": ("ordinary", "large", "tiny", "padded", "strided"),
        "weights": ("weight",),
        "gate_workloads": (workload(batch=3), workload(batch=1, context=8192)),
    }
    return Contract(**{**own, **fields})


def workload(**axes: int) -> Workload:
    """A workload of the example."""
    return Workload("example", tuple((name, axes.get(name, axis.default)) for name, axis in AXES.items()))


def right(x: Tensor, weight: Tensor, slots: Tensor, total: Tensor, out: Tensor) -> None:
    """An honest implementation, in float32."""
    live = slots >= 0
    rows = x[live].float()
    normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPS)
    out[live] = (normed.bfloat16() * weight).to(out.dtype)
    total[slots[live].long()] += rows


def variant(function: Callable[..., None]) -> Variant:
    """A function as a variant of the example."""
    return Variant("example", getattr(function, "__name__", "variant"), function)
