"""sparse_select_prefill: the blocks that every token of a piece of prompt attends to in a sparse layer."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from jaxtyping import BFloat16, Int32
from torch import Tensor

from reference.random import integers, stream_key
from workbench import histories
from workbench.contract import Axis, Contract, Cost, Expected, Output, Tolerance, Workload, workloads
from workbench.ops.sparse_select_decode import Selected

OP = "sparse_select_prefill"


def signature(
    q: BFloat16[Tensor, "tokens 32 128"],
    cu_seqlens: Int32[Tensor, "batch+1"],
    start: Int32[Tensor, "batch"],
    block_table: Int32[Tensor, "batch pages_of_a_sequence"],
    k1_cache: BFloat16[Tensor, "pages 2 4 128"],
    k2_cache: BFloat16[Tensor, "pages 2 128"],
    blocks: Int32[Tensor, "tokens 2 chosen"],
    init_blocks: int,
    local_blocks: int,
) -> None:
    """Choose the blocks of 64 keys that each token of a piece attends to, once for 16 query heads.

    Tokens cu_seqlens[b] … cu_seqlens[b+1]−1 of `q` are sequence b's, the first at position `start[b]`. The caches
    hold the compressed keys of the whole history up to the end of the piece, laid out as in `sparse_select_decode`;
    a token at position p sees of them j < ⌊(p+1)/16⌋−1 of k1 and c < ⌊(p+1)/64⌋−1 of k2, those whose windows have
    ended. Scores, block scores, forced blocks and the choice for each token are those of `sparse_select_decode`
    at n = p+1; in particular no block after ⌊p/64⌋ is ever chosen.

    Mutated: `blocks` of all tokens but those of a sequence with start −1 (padding).
    """


AXES = {
    "batch": Axis(1, "sequences, one piece each", high=128),
    "tokens": Axis(8192, "tokens of the longest piece", high=1 << 14),
    "context": Axis(65536, "keys of the longest sequence at the end of its piece", high=1 << 21),
    "chosen": Axis(96, "blocks chosen, the forced ones included", low=2, high=512),
    "init_blocks": Axis(1, "first blocks that are forced", low=0, high=8),
    "local_blocks": Axis(32, "blocks before the own one that are forced", low=0, high=128),
}


def pieces(op: str, seed: int, regime: str, workload: Workload) -> tuple[list[int], list[int]]:
    """Starts (−1: padding) and lengths of the pieces: all alike, or ragged with a first that is the longest."""
    batch, context = workload["batch"], workload["context"]
    longest = min(workload["tokens"], context)
    if regime not in ("ragged", "padded"):
        return [context - longest] * batch, [longest] * batch
    drawn = integers(stream_key(op, seed, regime, "pieces"), (batch, 2), 1 << 31).tolist()
    sizes = [longest if i == 0 else 1 + first % longest for i, (first, _) in enumerate(drawn)]
    starts = [
        context - longest if i == 0 else second % (context - size + 1)
        for i, ((_, second), size) in enumerate(zip(drawn, sizes))
    ]
    if batch > 2:
        starts[2] = 0
    return [-1 if regime == "padded" and i % 2 else value for i, value in enumerate(starts)], sizes


def bounds(sizes: list[int], device: torch.device) -> Tensor:
    """`cu_seqlens` of pieces of these sizes, int32 [batch+1]."""
    return torch.tensor([0, *sizes], device=device).cumsum(0).to(torch.int32)


def make_inputs(workload: Workload, seed: int, regime: str, device: torch.device) -> dict[str, Any]:
    """Every argument by name; see `workbench.histories.REGIMES`."""
    starts, sizes = pieces(OP, seed, regime, workload)
    keys = [-1 if start < 0 else start + size for start, size in zip(starts, sizes)]
    table, k1_cache, k2_cache = histories.compressed_caches(OP, seed, regime, keys, device)
    tokens = sum(sizes)
    q = histories.queries(OP, seed, regime, tokens, device)
    blocks = torch.empty((tokens, histories.KV_HEADS, workload["chosen"]), dtype=torch.int32, device=device)
    cu_seqlens = bounds(sizes, device)
    if regime == "padded":
        for row, start in enumerate(starts):
            if start < 0:
                q[sum(sizes[:row]) : sum(sizes[: row + 1])] = torch.nan
    if regime == "strided":
        q, table, k1_cache, k2_cache, blocks = map(histories.strided, (q, table, k1_cache, k2_cache, blocks))
    return {
        "q": q,
        "cu_seqlens": cu_seqlens,
        "start": torch.tensor(starts, dtype=torch.int32, device=device),
        "block_table": table,
        "k1_cache": k1_cache,
        "k2_cache": k2_cache,
        "blocks": blocks,
        "init_blocks": workload["init_blocks"],
        "local_blocks": workload["local_blocks"],
    }


def reference(law: ModuleType, args: Mapping[str, Any], precision: Any) -> dict[str, Expected]:
    """The law, a sequence at a time."""
    selected = Selected(law, args, precision)
    ends = args["cu_seqlens"].tolist()
    for row, start in enumerate(args["start"].tolist()):
        rows = slice(ends[row], ends[row + 1])
        if start >= 0 and rows.stop > rows.start:
            selected.add(rows, args["block_table"][row], start + rows.stop - rows.start, start)
    return {"blocks": selected.expected()}


def visible_rows(start: int, tokens: int, stride: int) -> int:
    """Compressed keys of `stride` seen by positions start … start+tokens−1, summed."""

    def before(p: int) -> int:  # Σ over positions below p of max(0, ⌊(i+1)/stride⌋ − 1)
        whole, rest = divmod(p + 1, stride)
        sums = stride * (whole * (whole - 1) // 2) + whole * rest - p
        return sums + min(p, stride - 1)

    return before(start + tokens) - before(start)


def cost(workload: Workload) -> Cost:
    """Every visible compressed key is multiplied with every query; each operand passes through memory once."""
    batch, context = workload["batch"], workload["context"]
    tokens = min(workload["tokens"], context)
    pairs = sum(visible_rows(context - tokens, tokens, stride) for stride in (16, 64))
    rows = max(0, context // 16 - 1) + max(0, context // 64 - 1)
    heads, dim, kv = histories.HEADS, histories.DIM, histories.KV_HEADS
    return Cost(
        flops=2.0 * batch * pairs * heads * dim,
        bytes_read=batch * (rows * kv * dim * 2 + tokens * heads * dim * 2 + 4 * (-(-context // 64)) + 8),
        bytes_written=batch * tokens * kv * workload["chosen"] * 4,
    )


_SMALL = {"chosen": 12, "local_blocks": 4}

PRESETS = {
    "smoke": workloads(
        OP,
        AXES,
        "smoke",
        {"batch": 1, "tokens": 63, "context": 63},
        {"batch": 3, "tokens": 12, "context": 1800, **_SMALL},
        {"batch": 1, "tokens": 9, "context": 8193},
    ),
    "prefill": workloads(
        OP,
        AXES,
        "prefill",
        {"batch": 1, "tokens": 8192, "context": 8192},
        {"batch": 1, "tokens": 8192, "context": 32768},
        {"batch": 1, "tokens": 8192, "context": 131072},
        {"batch": 1, "tokens": 16384, "context": 131072},
        {"batch": 8, "tokens": 1024, "context": 65536},
    ),
    "long": workloads(
        OP,
        AXES,
        "long",
        {"batch": 1, "tokens": 8192, "context": 1 << 20},
        {"batch": 1, "tokens": 2048, "context": 1 << 21},
    ),
    "race": workloads(
        OP,
        AXES,
        "race",
        {"batch": 1, "tokens": 8192, "context": 1 << 15},
        {"batch": 1, "tokens": 8192, "context": 1 << 17},
        {"batch": 1, "tokens": 8192, "context": 1 << 19},
        {"batch": 32, "tokens": 256, "context": 1 << 15},
        {"batch": 128, "tokens": 64, "context": 1 << 15},
    ),
}

CONTRACT = Contract(
    name=OP,
    summary="sparse layer, a piece of prompt: score the compressed keys, pool to blocks, choose the best",
    signature=signature,
    axes=AXES,
    outputs={"blocks": Output(Tolerance.SELECTION)},
    make_inputs=make_inputs,
    reference=reference,
    cost=cost,
    presets=PRESETS,
    regimes=histories.REGIMES,
    gate_workloads=workloads(
        OP,
        AXES,
        "gate",
        *({"batch": 1, "tokens": t, "context": n, **_SMALL} for t, n in ((1, 1), (65, 65), (9, 130))),
        *({"batch": 1, "tokens": 3, "context": n} for n in (6144, 6146, 8192)),
        {"batch": 1, "tokens": 20, "context": 1480, **_SMALL},
        {"batch": 3, "tokens": 17, "context": 1535, **_SMALL},
        # No local window: the newest windows decide, and so does whether they are visible.
        {"batch": 1, "tokens": 24, "context": 1488, "chosen": 8, "local_blocks": 0},
        {"batch": 2, "tokens": 12, "context": 1412, "chosen": 9, "local_blocks": 2, "init_blocks": 3},
    ),
)
