"""sparse_attention_prefill: a piece's tokens attend each to its chosen blocks, then the output gate."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from jaxtyping import BFloat16, Int32
from torch import Tensor

from workbench import attention
from workbench.contract import Axis, Contract, Cost, Expected, Output, Tolerance, Workload, workloads

OP = "sparse_attention_prefill"


def signature(
    q: BFloat16[Tensor, "tokens 32 128"],
    gate: BFloat16[Tensor, "tokens 4096"],
    cu_seqlens: Int32[Tensor, "batch+1"],
    start: Int32[Tensor, "batch"],
    block_table: Int32[Tensor, "batch max_pages"],
    blocks: Int32[Tensor, "tokens 2 topk_blocks"],
    k_cache: BFloat16[Tensor, "pages 2 64 128"],
    v_cache: BFloat16[Tensor, "pages 2 64 128"],
    out: BFloat16[Tensor, "tokens 4096"],
) -> None:
    """Attend from each token of a piece to the keys of its chosen blocks, up to its own position.

    Rows `cu_seqlens[b]` … `cu_seqlens[b+1]`−1 are the piece of sequence b, at positions `start[b]`, `start[b]`+1, …;
    their keys and values are in the cache already. `start[b]` = −1: the whole piece is padding, its output rows are
    not touched and its other inputs may hold anything. Block c of sequence b is page `block_table[b, c]`, keys 64c
    … 64c+63; entries past the last page are −1. `blocks[t, g]`: for token t and the query heads 16g … 16g+15, the
    chosen blocks, ascending, distinct, the token's own among them, −1 in the unused tail; keys past the token's
    position are not seen. Per head: exact softmax of q·k/√128 over the seen keys, mean of v by it, rounded to
    bfloat16; then times sigmoid(`gate`), itself rounded to bfloat16.

    Mutated: `out`. Pages of nobody, blocks that no token chose, and rows past the last key may hold NaN. Leading
    dimensions may be strided, the last never is.
    """


AXES = {
    "batch": Axis(1, "sequences, a piece each", high=128),
    "tokens": Axis(8192, "new tokens of the longest piece (no more than context)", high=16384),
    "context": Axis(1 << 17, "keys of the longest sequence, the piece's included", high=1 << 21),
    "topk_blocks": Axis(96, "chosen blocks a query, forced ones included", high=1024),
    "overlap": Axis(87, "percent of the freely chosen blocks that 8 neighbouring tokens share", low=0, high=100),
}


def make_inputs(workload: Workload, seed: int, regime: str, device: torch.device) -> dict[str, Any]:
    """Every argument by name; all pieces have `tokens` tokens, but in ragged and padded batches."""
    return attention.make_inputs(OP, seed, regime, dict(workload.axes), device)


def reference(law: ModuleType, args: Mapping[str, Any], precision: Any) -> dict[str, Expected]:
    """The law, a sequence at a time."""
    return attention.expected(law, args, precision, attention.prefill_spans(args))


def cost(workload: Workload) -> Cost:
    """Two products of the seen keys by 32 heads a token; each block that any token chose is read once."""
    batch, context, count = workload["batch"], workload["context"], workload["topk_blocks"]
    tokens = min(workload["tokens"], context)
    position = range(context - tokens, context)
    seen = sum(min(p + 1, (count - 1) * attention.PAGE + p % attention.PAGE + 1) for p in position)
    distinct = attention.distinct_blocks(context, tokens, count, workload["overlap"])
    keys = min(context, int(distinct * attention.PAGE))
    read = keys * attention.KEY_BYTES + tokens * (attention.ROW_BYTES + 4 * attention.KV_HEADS * count)
    return Cost(float(batch * seen * attention.KEY_FLOPS), batch * read, batch * tokens * attention.OUT_BYTES)


PRESETS = {
    "smoke": workloads(
        OP,
        AXES,
        "smoke",
        {"batch": 1, "tokens": 17, "context": 63},
        {"batch": 3, "tokens": 5, "context": 900, "topk_blocks": 8},
        {"batch": 1, "tokens": 3, "context": 6145},
    ),
    "prefill": workloads(
        OP,
        AXES,
        "prefill",
        {"batch": 1, "tokens": 8192, "context": 8192},
        {"batch": 1, "tokens": 8192, "context": 32768},
        {"batch": 1, "tokens": 8192, "context": 131072},
        {"batch": 1, "tokens": 8192, "context": 131072, "overlap": 0},
        {"batch": 8, "tokens": 1024, "context": 32768},
        {"batch": 32, "tokens": 256, "context": 32768},
        {"batch": 1, "tokens": 16384, "context": 131072},
        {"batch": 1, "tokens": 2048, "context": 65536},
        {"batch": 1, "tokens": 512, "context": 65536},
    ),
    "long": workloads(
        OP,
        AXES,
        "long",
        {"batch": 1, "tokens": 8192, "context": 1 << 20},
        {"batch": 1, "tokens": 8192, "context": 1 << 20, "overlap": 0},
        {"batch": 1, "tokens": 8192, "context": 1 << 21},
    ),
    "race": workloads(
        OP,
        AXES,
        "race",
        {"batch": 1, "tokens": 8192, "context": 32768},
        {"batch": 1, "tokens": 8192, "context": 524288},
        {"batch": 8, "tokens": 1024, "context": 131072},
        {"batch": 32, "tokens": 256, "context": 65536},
    ),
}

CONTRACT = Contract(
    name=OP,
    summary="a piece's tokens attend to their chosen blocks of a paged cache; output gate",
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
        {"batch": 2, "tokens": 1, "context": 1},
        {"batch": 2, "tokens": 64, "context": 64, "topk_blocks": 2},
        {"batch": 3, "tokens": 20, "context": 65},
        {"batch": 1, "tokens": 65, "context": 65, "topk_blocks": 3},
        {"batch": 1, "tokens": 9, "context": 127, "topk_blocks": 2},
        {"batch": 1, "tokens": 66, "context": 128, "topk_blocks": 1},
        {"batch": 4, "tokens": 20, "context": 300, "topk_blocks": 4},
        {"batch": 2, "tokens": 13, "context": 1000, "topk_blocks": 12, "overlap": 0},
        {"batch": 1, "tokens": 3, "context": 6143},
        {"batch": 1, "tokens": 4, "context": 6144},
        {"batch": 1, "tokens": 3, "context": 8191, "topk_blocks": 12},
        {"batch": 1, "tokens": 2, "context": 8192, "topk_blocks": 16},
        {"batch": 1, "tokens": 5, "context": 8193},
    ),
)
