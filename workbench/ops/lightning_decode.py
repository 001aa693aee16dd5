"""lightning_decode: one token a sequence through everything between a lightning layer's projections."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from jaxtyping import BFloat16, Float32, Int32
from torch import Tensor

from reference.random import integers, normal, stream_key
from workbench.contract import Axis, Contract, Cost, Expected, Output, Tolerance, Workload, workloads

OP = "lightning_decode"
DIM = 128
"""Channels of a head."""
SPARE_SLOTS = 3
"""States beside those of the batch, which nobody may touch."""
REFERENCE_ROWS = 16
"""Sequences the reference takes at once, to bound its float64 scratch."""

REGIMES = ("ordinary", "large", "tiny", "correlated", "uneven", "still", "ragged", "padded", "strided")
"""What each draws: `large` projections × 256, states × 1000, gates that saturate; `tiny` about 1e-3, so that every
eps bites; `correlated` queries and keys along one direction a head, values with a mean; `uneven` heads of very
different size; `still` values of zero, so that the state only decays; `ragged` positions from 0 on; `padded` rows
of slot −1 full of NaN, and NaN in the states nobody owns; `strided` views into wider buffers."""


def signature(
    qkvz: BFloat16[Tensor, "batch 4*heads*128"],
    q_norm: BFloat16[Tensor, "128"],
    k_norm: BFloat16[Tensor, "128"],
    o_norm: BFloat16[Tensor, "heads*128"],
    positions: Int32[Tensor, "batch"],
    slots: Int32[Tensor, "batch"],
    state: Float32[Tensor, "slots heads 128 128"],
    out: BFloat16[Tensor, "batch heads*128"],
) -> None:
    """Advance each sequence's state by one token and read it out.

    `qkvz` holds the projections q, k, v and z side by side. q and k are normed a head (eps 1e-6) with `q_norm` and
    `k_norm`, then rotated (theta 10000, halves of 64) at `positions`. With λ_h = exp(−2^(−(h+1)/4)) (for 32 heads)
    the state S of slot `slots[b]`, float32 with the key index first, becomes λ·S + k vᵀ; o = (q/√128)·S by the new
    state is rounded to bfloat16, normed over all heads together with `o_norm`, and multiplied by sigmoid(z).

    Mutated: `state` of the slots named, and `out`. A row with slot −1 is padding: it touches nothing, and its other
    inputs may hold anything. No slot is named twice. Leading dimensions may be strided, the last never is.
    """


AXES = {
    "batch": Axis(1, "sequences, one token each", high=128),
    "heads": Axis(32, "heads of 128 channels", high=64),
    "context": Axis(65536, "positions run up to here", high=1 << 21),
}


def draw_norms(op: str, seed: int, regime: str, heads: int, device: torch.device) -> dict[str, Tensor]:
    """Norm weights around 1, each channel its own: `q_norm`, `k_norm` [128], `o_norm` [heads·128], bfloat16."""
    widths = {"q_norm": DIM, "k_norm": DIM, "o_norm": heads * DIM}
    return {
        name: normal(stream_key(op, seed, regime, name), (width,), scale=0.25, offset=1.0, device=device)
        for name, width in widths.items()
    }


def draw_projections(
    op: str, seed: int, regime: str, rows: int, heads: int, device: torch.device, leaning: float = 0.0
) -> Tensor:
    """Packed q, k, v, z of `rows` tokens, bfloat16 [rows, 4·heads·128].

    `leaning` adds that share of a token's query to its key.
    """

    def part(name: str, scale: float = 1.0, offset: float = 0.0, count: int = rows) -> Tensor:
        shape = (count, heads * DIM)
        return normal(stream_key(op, seed, regime, name), shape, scale=scale, offset=offset, device=device)

    size, gate = {"large": (256.0, 64.0), "tiny": (1e-3, 1.0)}.get(regime, (1.0, 1.0))
    q, k, v, z = part("q", size), part("k", size), part("v", size), part("z", gate)
    if regime == "correlated":
        shared = part("shared", count=1)
        q, k, v = q * 0.25 + shared, k * 0.25 + shared, v + 1
    else:
        k = k + q * leaning
    if regime == "uneven":
        v = v * head_sizes(heads, device).repeat_interleave(DIM).to(v.dtype)
    if regime == "still":
        v = torch.zeros_like(v)
    return torch.cat((q, k, v, z), dim=-1)


def head_sizes(heads: int, device: torch.device) -> Tensor:
    """Factors 2^−3 … 2^3 of the heads in the regime `uneven`, float32 [heads]."""
    return torch.exp2((torch.arange(heads, device=device) % 7 - 3).float())


def draw_states(op: str, seed: int, regime: str, slots: int, heads: int, device: torch.device) -> Tensor:
    """States of every slot, float32 [slots, heads, 128, 128]; `strided`: one layer of a buffer of two."""
    scale = {"large": 1e3, "tiny": 1e-3}.get(regime, 1.0)
    shape = (slots, heads, DIM, DIM)
    state = normal(stream_key(op, seed, regime, "state"), shape, scale=scale, dtype=torch.float32, device=device)
    if regime == "uneven":
        state *= head_sizes(heads, device)[:, None, None]
    if regime == "strided":
        both = torch.full((slots, 2, heads, DIM, DIM), torch.nan, device=device)
        both[:, 1] = state
        state = both[:, 1]
    return state


def draw_slots(op: str, seed: int, regime: str, batch: int, device: torch.device) -> Tensor:
    """A slot for each sequence, all different and in no order, int32 [batch]."""
    lots = integers(stream_key(op, seed, regime, "slots"), (batch + SPARE_SLOTS,), 1 << 30, device=device)
    return lots.argsort(stable=True)[:batch].to(torch.int32)


def spaced(rows: Tensor, gap: int = 64) -> Tensor:
    """The same [rows, width] values as a view whose rows lie `gap` elements further apart, NaN between them."""
    wide = torch.full((rows.shape[0], rows.shape[1] + gap), torch.nan, dtype=rows.dtype, device=rows.device)
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]


def make_inputs(workload: Workload, seed: int, regime: str, device: torch.device) -> dict[str, Any]:
    """Every argument by name. The first row stands at the last position of the context."""
    batch, heads, context = workload["batch"], workload["heads"], workload["context"]
    qkvz = draw_projections(OP, seed, regime, batch, heads, device)
    state = draw_states(OP, seed, regime, batch + SPARE_SLOTS, heads, device)
    slots = draw_slots(OP, seed, regime, batch, device)
    positions = integers(stream_key(OP, seed, regime, "positions"), (batch,), context, device=device)
    positions = positions.to(torch.int32)
    positions[0] = context - 1
    if regime == "ragged":
        positions[1:] = torch.arange(batch - 1, device=device) % context
    out = torch.empty(batch, heads * DIM, dtype=torch.bfloat16, device=device)
    if regime == "padded":
        owned = torch.zeros(state.shape[0], dtype=torch.bool, device=device)
        owned[slots.long()] = True
        state[~owned] = torch.nan
        rows = slice(1, None, 3)  # of one sequence alone none is padding
        slots[rows], positions[rows], qkvz[rows] = -1, -1, torch.nan
    if regime == "strided":
        qkvz, out = spaced(qkvz), spaced(out)
    norms = draw_norms(OP, seed, regime, heads, device)
    return {"qkvz": qkvz, **norms, "positions": positions, "slots": slots, "state": state, "out": out}


def reference(law: ModuleType, args: Mapping[str, Any], precision: Any) -> dict[str, Expected]:
    """The law for every live row, `REFERENCE_ROWS` at a time; what padding and spare slots hold is kept."""
    wide = torch.float64 if precision is law.numerics.ORACLE else None
    slots = args["slots"].long()
    live = slots >= 0
    state = args["state"].to(wide or torch.float32, copy=True)
    out = torch.zeros(args["out"].shape, dtype=wide or torch.bfloat16, device=slots.device)
    norms = (args["q_norm"], args["k_norm"], args["o_norm"])
    for rows in live.nonzero()[:, 0].split(REFERENCE_ROWS):
        tokens, at = args["qkvz"][rows][:, None], args["positions"][rows][:, None]
        result, after = law.lightning.lightning_mixer(tokens, *norms, at, args["state"][slots[rows]], precision)
        out[rows], state[slots[rows]] = result[:, 0], after
    touched = torch.zeros(state.shape[:2], dtype=torch.bool, device=slots.device)
    touched[slots[live]] = True
    return {"state": Expected(state, touched), "out": Expected(out, live)}


def cost(workload: Workload) -> Cost:
    """Each state is read and written once, each projection read once; outer product and read-out are counted."""
    batch, heads = workload["batch"], workload["heads"]
    states, row = batch * heads * DIM * DIM, heads * DIM
    read = 4 * states + 2 * batch * 4 * row + 2 * (row + 2 * DIM) + 8 * batch
    return Cost(flops=4.0 * states, bytes_read=read, bytes_written=4 * states + 2 * batch * row)


PRESETS = {
    "smoke": workloads(
        OP,
        AXES,
        "smoke",
        {"batch": 1, "heads": 4, "context": 63},
        {"batch": 3, "heads": 2, "context": 65536},
        {"batch": 2, "heads": 3, "context": 64},
    ),
    "decode": workloads(OP, AXES, "decode", *({"batch": b, "context": 65536} for b in (1, 2, 4, 8, 16, 32, 64, 128))),
    "long": workloads(
        OP, AXES, "long", *({"batch": b, "context": c} for b, c in ((1, 1 << 20), (8, 1 << 20), (1, 1 << 21)))
    ),
    "race": workloads(
        OP,
        AXES,
        "race",
        *({"batch": b, "context": c} for b, c in ((1, 1 << 19), (8, 1 << 17), (32, 1 << 15), (64, 1 << 15))),
    ),
}

CONTRACT = Contract(
    name=OP,
    summary="lightning layer, one token a sequence: head norms, rotation, state update, read-out, norm, gate",
    signature=signature,
    axes=AXES,
    outputs={
        "state": Output(Tolerance.ORACLE, inout=True, row_dims=2, floor=2.0**-20),
        "out": Output(Tolerance.ORACLE),
    },
    make_inputs=make_inputs,
    reference=reference,
    cost=cost,
    presets=PRESETS,
    regimes=REGIMES,
    weights=("q_norm", "k_norm", "o_norm"),
    gate_workloads=workloads(
        OP,
        AXES,
        "gate",
        *({"batch": b, "heads": 2, "context": c} for b, c in ((1, 64), (3, 65), (1, 128), (2, 8191), (1, 8192))),
        {"batch": 3, "heads": 2, "context": 8193},
        {"batch": 2, "heads": 2, "context": 1 << 21},
        {"batch": 1, "heads": 32, "context": 1 << 20},
    ),
)
