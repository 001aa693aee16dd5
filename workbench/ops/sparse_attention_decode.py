"""sparse_attention_decode: one token a sequence attends to its chosen blocks, then the output gate."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from jaxtyping import BFloat16, Int32
from torch import Tensor

from workbench import attention
from workbench.contract import Axis, Contract, Cost, Expected, Output, Tolerance, Workload, workloads

OP = "sparse_attention_decode"


def signature(
    q: BFloat16[Tensor, "batch 32 128"],
    gate: BFloat16[Tensor, "batch 4096"],
    lengths: Int32[Tensor, "batch"],
    block_table: Int32[Tensor, "batch max_pages"],
    blocks: Int32[Tensor, "batch 2 topk_blocks"],
    k_cache: BFloat16[Tensor, "pages 2 64 128"],
    v_cache: BFloat16[Tensor, "pages 2 64 128"],
    out: BFloat16[Tensor, "batch 4096"],
) -> None:
    """Attend from each sequence's newest token to the keys of its chosen blocks.

    `lengths[b]` = n counts the keys, the token's own (position n−1) included; −1 is a padded row: its output row is
    not touched and its other inputs may hold anything. Block c of sequence b is page `block_table[b, c]`, keys 64c
    … 64c+63; entries past the last page are −1. `blocks[b, g]`: for the query heads 16g … 16g+15, the chosen blocks,
    ascending, distinct, the newest among them, −1 in the unused tail; keys at n and beyond are not seen.
    Per head: exact softmax of q·k/√128 over the seen keys, mean of v by it, rounded to bfloat16; then times
    sigmoid(`gate`), itself rounded to bfloat16.

    Mutated: `out`. Pages of nobody, blocks that were not chosen, and rows past the length may hold NaN. Leading
    dimensions may be strided, the last never is.
    """


AXES = {
    "batch": Axis(1, "sequences, one token each", high=128),
    "context": Axis(1 << 17, "keys of the longest sequence, the new one included", high=1 << 21),
    "topk_blocks": Axis(96, "chosen blocks a query, forced ones included", high=1024),
}


def make_inputs(workload: Workload, seed: int, regime: str, device: torch.device) -> dict[str, Any]:
    """Every argument by name; all sequences have `context` keys, but ragged and padded batches."""
    return attention.make_inputs(OP, seed, regime, dict(workload.axes), device)


def reference(law: ModuleType, args: Mapping[str, Any], precision: Any) -> dict[str, Expected]:
    """The law, a sequence at a time."""
    return attention.expected(law, args, precision, attention.decode_spans(args))


def cost(workload: Workload) -> Cost:
    """Chosen keys and values read once a key-value head; two products of the seen keys by 32 heads."""
    batch, context, count = workload["batch"], workload["context"], workload["topk_blocks"]
    seen = min(context, (count - 1) * attention.PAGE + (context - 1) % attention.PAGE + 1)
    read = seen * attention.KEY_BYTES + attention.ROW_BYTES + 4 * attention.KV_HEADS * count
    return Cost(float(batch * seen * attention.KEY_FLOPS), batch * read, batch * attention.OUT_BYTES)


PRESETS = {
    "smoke": workloads(
        OP,
        AXES,
        "smoke",
        {"batch": 1, "context": 63},
        {"batch": 3, "context": 900, "topk_blocks": 8},
        {"batch": 2, "context": 6145},
    ),
    "decode": workloads(
        OP,
        AXES,
        "decode",
        {"batch": 1, "context": 32768},
        {"batch": 2, "context": 32768},
        {"batch": 4, "context": 32768},
        {"batch": 8, "context": 32768},
        {"batch": 16, "context": 32768},
        {"batch": 32, "context": 32768},
        {"batch": 64, "context": 32768},
        {"batch": 128, "context": 32768},
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
        {"batch": 1, "context": 32768},
        {"batch": 1, "context": 524288},
        {"batch": 8, "context": 32768},
        {"batch": 8, "context": 131072},
        {"batch": 32, "context": 32768},
        {"batch": 32, "context": 131072},
    ),
}

CONTRACT = Contract(
    name=OP,
    summary="one token a sequence attends to its chosen blocks of a paged cache; output gate",
    signature=signature,
    axes=AXES,
    outputs={"out": Output(Tolerance.ORACLE)},
    make_inputs=make_inputs,
    reference=reference,
    cost=cost,
    presets=PRESETS,
    regimes=attention.SPARSE_REGIMES,
    gate_workloads=workloads(
        OP,
        AXES,
        "gate",
        {"batch": 2, "context": 1},
        {"batch": 2, "context": 64},
        {"batch": 3, "context": 65},
        {"batch": 1, "context": 127, "topk_blocks": 2},
        {"batch": 1, "context": 128, "topk_blocks": 1},
        {"batch": 4, "context": 700, "topk_blocks": 4},
        {"batch": 3, "context": 1000, "topk_blocks": 12},
        {"batch": 1, "context": 6143},
        {"batch": 1, "context": 6144},
        {"batch": 1, "context": 8191, "topk_blocks": 12},
        {"batch": 1, "context": 8192, "topk_blocks": 16},
        {"batch": 1, "context": 8193},
    ),
)
