"""dense_attention_prefill: a piece's tokens attend to all keys up to their own, then the output gate."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from jaxtyping import BFloat16, Int32
from torch import Tensor

from workbench import attention
from workbench.contract import Axis, Contract, Cost, Expected, Output, Tolerance, Workload, workloads

OP = "dense_attention_prefill"


def signature(
    q: BFloat16[Tensor, "tokens 32 128"],
    gate: BFloat16[Tensor, "tokens 4096"],
    cu_seqlens: Int32[Tensor, "batch+1"],
    start: Int32[Tensor, "batch"],
    block_table: Int32[Tensor, "batch max_pages"],
    k_cache: BFloat16[Tensor, "pages 2 64 128"],
    v_cache: BFloat16[Tensor, "pages 2 64 128"],
    out: BFloat16[Tensor, "tokens 4096"],
) -> None:
    """Attend from each token of a piece to all keys up to its own position.

    Rows `cu_seqlens[b]` … `cu_seqlens[b+1]`−1 are the piece of sequence b, at positions `start[b]`, `start[b]`+1, …;
    their keys and values are in the cache already. `start[b]` = −1: the whole piece is padding, its output rows are
    not touched and its other inputs may hold anything. Keys 64c … 64c+63 of sequence b are page `block_table[b, c]`;
    entries past the last page are −1. Query head h reads key-value head h // 16. Per head: exact softmax of
    q·k/√128 over keys 0 … position, mean of v by it, rounded to bfloat16; then times sigmoid(`gate`), itself
    rounded to bfloat16.

    Mutated: `out`. Pages of nobody and rows past the last key may hold NaN. Leading dimensions may be strided, the
    last never is.
    """


AXES = {
    "batch": Axis(1, "sequences, a piece each", high=128),
    "tokens": Axis(8192, "new tokens of the longest piece (no more than context)", high=16384),
    "context": Axis(8192, "keys of the longest sequence, the piece's included", high=1 << 21),
}


def make_inputs(workload: Workload, seed: int, regime: str, device: torch.device) -> dict[str, Any]:
    """Every argument by name; all pieces have `tokens` tokens, but in ragged and padded batches."""
    return attention.make_inputs(OP, seed, regime, dict(workload.axes), device)


def reference(law: ModuleType, args: Mapping[str, Any], precision: Any) -> dict[str, Expected]:
    """The law, a sequence at a time."""
    return attention.expected(law, args, precision, attention.prefill_spans(args))


def cost(workload: Workload) -> Cost:
    """Two products of the seen keys by 32 heads a token (the causal half); every key and value read once."""
    batch, context = workload["batch"], workload["context"]
    tokens = min(workload["tokens"], context)
    seen = tokens * (context - tokens) + tokens * (tokens + 1) // 2
    read = context * attention.KEY_BYTES + tokens * attention.ROW_BYTES
    return Cost(float(batch * seen * attention.KEY_FLOPS), batch * read, batch * tokens * attention.OUT_BYTES)


PRESETS = {
    "smoke": workloads(
        OP,
        AXES,
        "smoke",
        {"batch": 1, "tokens": 17, "context": 63},
        {"batch": 3, "tokens": 5, "context": 900},
        {"batch": 1, "tokens": 20, "context": 1000},
    ),
    "prefill": workloads(
        OP,
        AXES,
        "prefill",
        {"batch": 1, "tokens": 8191, "context": 8191},
        {"batch": 1, "tokens": 4096, "context": 4096},
        {"batch": 1, "tokens": 2048, "context": 8192},
        {"batch": 4, "tokens": 2048, "context": 2048},
        {"batch": 8, "tokens": 1024, "context": 1024},
        {"batch": 32, "tokens": 256, "context": 2048},
        {"batch": 1, "tokens": 16384, "context": 16384},
    ),
    "long": workloads(
        OP,
        AXES,
        "long",
        {"batch": 1, "tokens": 8192, "context": 1 << 18},
        {"batch": 1, "tokens": 2048, "context": 1 << 20},
        {"batch": 1, "tokens": 512, "context": 1 << 21},
    ),
    "race": workloads(
        OP,
        AXES,
        "race",
        {"batch": 1, "tokens": 8192, "context": 8192},
        {"batch": 1, "tokens": 8192, "context": 32768},
        {"batch": 8, "tokens": 1024, "context": 8192},
        {"batch": 32, "tokens": 256, "context": 4096},
    ),
}

CONTRACT = Contract(
    name=OP,
    summary="a piece's tokens attend causally to a paged cache; output gate",
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
        {"batch": 2, "tokens": 1, "context": 1},
        {"batch": 2, "tokens": 64, "context": 64},
        {"batch": 3, "tokens": 20, "context": 65},
        {"batch": 1, "tokens": 65, "context": 65},
        {"batch": 1, "tokens": 64, "context": 127},
        {"batch": 1, "tokens": 100, "context": 128},
        {"batch": 4, "tokens": 20, "context": 300},
        {"batch": 1, "tokens": 3, "context": 8191},
        {"batch": 1, "tokens": 2, "context": 8192},
        {"batch": 1, "tokens": 5, "context": 8193},
    ),
)
