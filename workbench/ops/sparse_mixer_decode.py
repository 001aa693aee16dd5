"""sparse_mixer_decode: one token a sequence through everything between a sparse layer's projections."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from jaxtyping import BFloat16, Int32
from torch import Tensor

from reference.compression import compress
from reference.numerics import MODEL
from reference.paging import scatter
from reference.random import integers, normal, stream_key
from workbench import histories
from workbench.contract import Axis, Contract, Cost, Expected, Output, Tolerance, Workload, workloads
from workbench.ops import key_compression, sparse_attention_decode, sparse_select_decode
from workbench.ops.key_compression import WINDOWS, Caches

OP = "sparse_mixer_decode"
WIDTH = histories.HEADS * histories.DIM
KV_WIDTH = histories.KV_HEADS * histories.DIM
REGIMES = ("ordinary", "large", "sharp", "shut", "ragged", "padded", "strided")
"""`large` values and gates; `sharp` attention that a few keys dominate; `shut` gates near zero."""


def signature(
    qkvg: BFloat16[Tensor, "batch 8704"],
    lengths: Int32[Tensor, "batch"],
    block_table: Int32[Tensor, "batch pages_of_a_sequence"],
    k_cache: BFloat16[Tensor, "pages 2 64 128"],
    v_cache: BFloat16[Tensor, "pages 2 64 128"],
    k1_cache: BFloat16[Tensor, "pages 2 4 128"],
    k2_cache: BFloat16[Tensor, "pages 2 128"],
    out: BFloat16[Tensor, "batch 4096"],
    topk_blocks: int,
    init_blocks: int,
    local_blocks: int,
) -> None:
    """Append one token a sequence, choose its blocks, attend to them, and gate: the three parts in a row.

    `qkvg` holds q (32 heads of 128), k and v (2 heads each) and the output gate side by side. `lengths[b]` = n counts
    the new token, which becomes key n−1: `key_compression` at start n−1, then `sparse_select_decode` with K =
    `topk_blocks`, then `sparse_attention_decode`. A window that the new key completes is seen by this very token.

    Mutated: the four caches as by `key_compression`, and `out`. A sequence of length −1 is padding and touches
    nothing. The scores of the inputs are far apart at the last block that gets in, so that rounding never decides.
    """


AXES = {
    "batch": Axis(1, "sequences, one token each", high=128),
    "context": Axis(65536, "keys of the longest sequence, the new one included", high=1 << 21),
    "topk_blocks": Axis(96, "blocks chosen, the forced ones included", low=2, high=512),
    "init_blocks": Axis(1, "first blocks that are forced", low=0, high=8),
    "local_blocks": Axis(32, "blocks before the own one that are forced", low=0, high=128),
}


def favoured(workload: Workload, seed: int, sequence: int, n: int, device: torch.device) -> Tensor:
    """Which blocks of a sequence score high: as many free ones as can be chosen, bool [2, blocks]."""
    own = (n - 1) // 64
    marks = torch.zeros((histories.KV_HEADS, own + 1), dtype=torch.bool)
    first, last = workload["init_blocks"], own - workload["local_blocks"]
    free = last - first
    places = workload["topk_blocks"] - first - workload["local_blocks"] - 1
    if 0 < places < free:
        lots = integers(stream_key(OP, seed, "favoured", sequence), (histories.KV_HEADS, free), 1 << 31)
        order = torch.sort(lots, dim=-1, stable=True).indices[:, :places]
        marks[:, first:last].scatter_(1, order, True)
    return marks.to(device)


def make_inputs(workload: Workload, seed: int, regime: str, device: torch.device) -> dict[str, Any]:
    """Every argument by name. Keys of favoured blocks lie along the queries, so that the choice is clear."""
    batch, kv, dim = workload["batch"], histories.KV_HEADS, histories.DIM
    keys = histories.lengths(OP, seed, regime, batch, workload["context"])
    table, pages = histories.block_tables(OP, seed, keys, device)
    shapes: dict[str, tuple[int, ...]] = {name: (pages, kv, 64, dim) for name in ("k_cache", "v_cache")}
    shapes |= {"k1_cache": (pages, kv, 4, dim), "k2_cache": (pages, kv, dim)}
    caches = {name: histories.garbage(regime, shape, device) for name, shape in shapes.items()}
    size = {"large": 64.0}.get(regime, 1.0)
    for row, n in enumerate(keys):
        if n > 1:
            k = normal(stream_key(OP, seed, regime, "k", row), (n - 1, kv, dim), device=device)
            high = favoured(workload, seed, row, n, device).repeat_interleave(64, 1)[:, : n - 1]
            for group in range(kv):
                k[:, group, group] = high[group] * 8.0
                k[:, group, 1 - group] = high[1 - group] * 12.0  # what the other group's queries look for
            v = normal(stream_key(OP, seed, regime, "v", row), (n - 1, kv, dim), scale=size, device=device)
            scatter(caches["k_cache"], table[row], 0, k)
            scatter(caches["v_cache"], table[row], 0, v)
            for name, window in zip(("k1_cache", "k2_cache"), WINDOWS):
                scatter(caches[name], table[row], 0, compress(k, *window, MODEL))
    qkvg = normal(stream_key(OP, seed, regime, "qkvg"), (batch, 2 * WIDTH + 2 * KV_WIDTH), device=device)
    q, k, v, gate = split(qkvg)
    if regime == "sharp":
        q *= 2.0
    q[..., :2] = 0.0
    for group in range(kv):
        q[:, group * histories.GROUP : (group + 1) * histories.GROUP, group] = 4.0
    v *= size
    if regime == "large":
        gate *= 16.0
    elif regime == "shut":
        # All about alike: were a few gates far wider open than the rest, their errors alone would be the row's.
        gate *= 0.25
        gate -= 12.0
    out = torch.empty((batch, WIDTH), dtype=torch.bfloat16, device=device)
    if regime == "padded":
        qkvg[1::2] = torch.nan
    if regime == "strided":
        qkvg, table, out = map(histories.strided, (qkvg, table, out))
        caches = {name: histories.strided(cache) for name, cache in caches.items()}
    return {
        "qkvg": qkvg,
        "lengths": torch.tensor(keys, dtype=torch.int32, device=device),
        "block_table": table,
        **{name: caches[name] for name in ("k_cache", "v_cache", "k1_cache", "k2_cache")},
        "out": out,
        "topk_blocks": workload["topk_blocks"],
        "init_blocks": workload["init_blocks"],
        "local_blocks": workload["local_blocks"],
    }


def split(qkvg: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of q [B, 32, 128], k and v [B, 2, 128], gate [B, 4096] in the packed projections."""
    q, k, v, gate = qkvg.split((WIDTH, KV_WIDTH, KV_WIDTH, WIDTH), -1)
    dim = histories.DIM
    return q.unflatten(-1, (-1, dim)), k.unflatten(-1, (-1, dim)), v.unflatten(-1, (-1, dim)), gate


def reference(law: ModuleType, args: Mapping[str, Any], precision: Any) -> dict[str, Expected]:
    """The law's three parts, a sequence at a time."""
    caches = Caches(law, args, precision)
    q, k, v, gate = split(args["qkvg"])
    oracle = precision is law.numerics.ORACLE
    out = torch.zeros(args["out"].shape, dtype=torch.float64 if oracle else torch.bfloat16, device=q.device)
    for row, n in enumerate(args["lengths"].tolist()):
        if n < 0:
            continue
        table, rows = args["block_table"][row], slice(row, row + 1)
        caches.append(k[rows], v[rows], n - 1, table)
        k_cache, v_cache, k1_cache, k2_cache = caches.copies.values()
        position = torch.tensor([n - 1], device=q.device)
        chosen = law.selection.select_blocks(
            q[rows],
            law.paging.gather(k1_cache, table, law.compression.window_count(n, 32, 16)),
            law.paging.gather(k2_cache, table, law.compression.window_count(n, 128, 64)),
            position,
            n,
            topk_total=args["topk_blocks"],
            local_blocks=args["local_blocks"],
            init_blocks=args["init_blocks"],
            precision=precision,
        )
        keys, values = (law.paging.gather(cache, table, n) for cache in (k_cache, v_cache))
        attended = law.attention.attend_blocks(q[rows], keys, values, chosen, position, precision)
        out[rows] = law.attention.output_gate(attended.flatten(1), gate[rows], precision)
    return {**caches.expected(), "out": Expected(out, args["lengths"] >= 0)}


def cost(workload: Workload) -> Cost:
    """What the parts cost, without what passes between them: q and the table once, no list of blocks."""
    batch, context = workload["batch"], workload["context"]
    sizes = {"batch": batch, "context": context}
    append = key_compression.cost(key_compression.CONTRACT.workload(tokens=1, **sizes))
    select = sparse_select_decode.cost(sparse_select_decode.CONTRACT.workload(chosen=workload["topk_blocks"], **sizes))
    attend = sparse_attention_decode.cost(
        sparse_attention_decode.CONTRACT.workload(topk_blocks=workload["topk_blocks"], **sizes)
    )
    listed = batch * histories.KV_HEADS * workload["topk_blocks"] * 4
    flops, read = (sum(getattr(part, name) for part in (append, select, attend)) for name in ("flops", "bytes_read"))
    return Cost(
        flops=flops,
        bytes_read=read - listed - batch * WIDTH * 2,
        bytes_written=append.bytes_written + attend.bytes_written,
    )


_SMALL = {"topk_blocks": 12, "local_blocks": 4}

PRESETS = {
    "smoke": workloads(
        OP,
        AXES,
        "smoke",
        {"batch": 1, "context": 63},
        {"batch": 3, "context": 1152, **_SMALL},
        {"batch": 1, "context": 8193},
    ),
    "decode": workloads(
        OP,
        AXES,
        "decode",
        *({"batch": b, "context": c} for b, c in ((1, 65536), (8, 65536), (32, 65536), (128, 16384))),
    ),
    "long": workloads(OP, AXES, "long", {"batch": 1, "context": 1 << 20}, {"batch": 1, "context": 1 << 21}),
    "race": workloads(
        OP,
        AXES,
        "race",
        *({"batch": b, "context": c} for b, c in ((1, 1 << 19), (8, 1 << 17), (32, 1 << 15))),
    ),
}

CONTRACT = Contract(
    name=OP,
    summary="sparse layer, one token a sequence: append and compress, choose blocks, attend, gate",
    signature=signature,
    axes=AXES,
    outputs={**key_compression.CONTRACT.outputs, "out": Output(Tolerance.ORACLE)},
    make_inputs=make_inputs,
    reference=reference,
    cost=cost,
    presets=PRESETS,
    regimes=REGIMES,
    parts=("key_compression", "sparse_select_decode", "sparse_attention_decode"),
    gate_workloads=workloads(
        OP,
        AXES,
        "gate",
        *({"batch": 1, "context": n, **_SMALL} for n in (1, 64, 65, 127, 128, 129, 1280)),
        *({"batch": 1, "context": n} for n in (6145, 8192)),
        {"batch": 2, "context": 1361, "topk_blocks": 9, "local_blocks": 2, "init_blocks": 3},
    ),
)
