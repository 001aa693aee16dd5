"""dense_attention_decode: one token a sequence attends to all its keys, then the output gate."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from jaxtyping import BFloat16, Int32
from torch import Tensor

from workbench import attention
from workbench.contract import Axis, Contract, Cost, Expected, Output, Tolerance, Workload, workloads

OP = "dense_attention_decode"


def signature(
    q: BFloat16[Tensor, "batch 32 128"],
    gate: BFloat16[Tensor, "batch 4096"],
    lengths: Int32[Tensor, "batch"],
    block_table: Int32[Tensor, "batch max_pages"],
    k_cache: BFloat16[Tensor, "pages 2 64 128"],
    v_cache: BFloat16[Tensor, "pages 2 64 128"],
    out: BFloat16[Tensor, "batch 4096"],
) -> None:
    """Attend from each sequence's newest token to all its keys.

    `lengths[b]` = n counts the keys, the token's own (position n−1) included; −1 is a padded row: its output row is
    not touched and its other inputs may hold anything. Keys 64c … 64c+63 of sequence b are page `block_table[b, c]`;
    entries past the last page are −1. Query head h reads key-value head h // 16. Per head: exact softmax of
    q·k/√128 over keys 0 … n−1, mean of v by it, rounded to bfloat16; then times sigmoid(`gate`), itself rounded to
    bfloat16.

    Mutated: `out`. Pages of nobody and rows past the length may hold NaN. Leading dimensions may be strided, the
    last never is.
    """


AXES = {
    "batch": Axis(1, "sequences, one token each", high=128),
    "context": Axis(8191, "keys of the longest sequence, the new one included", high=1 << 21),
}


def make_inputs(workload: Workload, seed: int, regime: str, device: torch.device) -> dict[str, Any]:
    """Every argument by name; all sequences have `context` keys, but ragged and padded batches."""
    return attention.make_inputs(OP, seed, regime, dict(workload.axes), device)


def reference(law: ModuleType, args: Mapping[str, Any], precision: Any) -> dict[str, Expected]:
    """The law, a sequence at a time."""
    return attention.expected(law, args, precision, attention.decode_spans(args))


def cost(workload: Workload) -> Cost:
    """Every key and value read once; two products of all keys by 32 heads."""
    batch, context = workload["batch"], workload["context"]
    read = context * attention.KEY_BYTES + attention.ROW_BYTES
    return Cost(float(batch * context * attention.KEY_FLOPS), batch * read, batch * attention.OUT_BYTES)


PRESETS = {
    "smoke": workloads(
        OP,
        AXES,
        "smoke",
        {"batch": 1, "context": 63},
        {"batch": 3, "context": 900},
        {"batch": 2, "context": 2049},
    ),
    "decode": workloads(
        OP,
        AXES,
        "decode",
        {"batch": 1, "context": 8191},
        {"batch": 2, "context": 8191},
        {"batch": 4, "context": 8191},
        {"batch": 8, "context": 8191},
        {"batch": 16, "context": 8191},
        {"batch": 32, "context": 8191},
        {"batch": 64, "context": 8191},
        {"batch": 128, "context": 8191},
    ),
    "long": workloads(
        OP,
        AXES,
        "long",
        {"batch": 1, "context": 1 << 20},
        {"batch": 8, "context": 1 << 20},
        {"batch": 1, "context": 1 << 21},
    ),
    "race": workloads(
        OP,
        AXES,
        "race",
        {"batch": 1, "context": 4096},
        {"batch": 1, "context": 32768},
        {"batch": 1, "context": 524288},
        {"batch": 8, "context": 4096},
        {"batch": 8, "context": 32768},
        {"batch": 32, "context": 4096},
        {"batch": 32, "context": 32768},
    ),
}

CONTRACT = Contract(
    name=OP,
    summary="one token a sequence attends to its whole paged cache; output gate",
    signature=signature,
    axes=AXES,
    outputs={"out": Output(Tolerance.ORACLE)},
    make_inputs=make_inputs,
    reference=reference,
    cost=cost,
    presets=PRESETS,
    regimes=attention.DENSE_REGIMES,
    gate_workloads=workloads(
        OP,
        AXES,
        "gate",
        {"batch": 2, "context": 1},
        {"batch": 2, "context": 64},
        {"batch": 3, "context": 65},
        {"batch": 1, "context": 127},
        {"batch": 1, "context": 128},
        {"batch": 4, "context": 700},
        {"batch": 1, "context": 8191},
        {"batch": 1, "context": 8192},
        {"batch": 1, "context": 8193},
    ),
)
