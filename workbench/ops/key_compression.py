"""key_compression: append a piece's keys and values to the paged cache and complete its windows."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from jaxtyping import BFloat16, Int32
from torch import Tensor

from reference.paging import scatter
from reference.random import normal, stream_key
from workbench import histories
from workbench.contract import Axis, Contract, Cost, Expected, Output, Tolerance, Workload, workloads
from workbench.ops.sparse_select_prefill import bounds, pieces

OP = "key_compression"
WINDOWS = ((32, 16), (128, 64))
"""Size and stride of the windows of k1 and k2."""
REGIMES = ("ordinary", "large", "tiny", "correlated", "alternating", "ragged", "padded", "strided")
"""`correlated`: keys around a mean of their own per channel; `alternating`: large keys of either sign that cancel in
a window; `large` about 1e4; `tiny` about 1e-6. Rows nobody has written yet hold NaN in all of them."""


def signature(
    k: BFloat16[Tensor, "tokens 2 128"],
    v: BFloat16[Tensor, "tokens 2 128"],
    cu_seqlens: Int32[Tensor, "batch+1"],
    start: Int32[Tensor, "batch"],
    block_table: Int32[Tensor, "batch pages_of_a_sequence"],
    k_cache: BFloat16[Tensor, "pages 2 64 128"],
    v_cache: BFloat16[Tensor, "pages 2 64 128"],
    k1_cache: BFloat16[Tensor, "pages 2 4 128"],
    k2_cache: BFloat16[Tensor, "pages 2 128"],
) -> None:
    """Append keys and values to paged caches; complete the compressed keys whose windows end in the piece.

    Tokens cu_seqlens[b] … cu_seqlens[b+1]−1 are sequence b's keys number start[b] and on; with one token each this is
    decode. Key i goes to `k_cache[block_table[b, i//64], :, i%64]`, its value likewise. k1 row j is the mean of keys
    16j … 16j+31, accumulated in float32 and rounded to bfloat16, and goes to
    `k1_cache[block_table[b, j//4], :, j%4]`; k2 row c, the mean of keys 64c … 64c+127, to
    `k2_cache[block_table[b, c]]`. Exactly the rows whose last key is in this piece are written; their windows
    may begin in earlier pieces, whose keys are in `k_cache`. Rows and pages not named keep their bits.

    Mutated: the four caches. A sequence with start −1 is padding: its tokens go nowhere.
    """


AXES = {
    "batch": Axis(1, "sequences, one piece each", high=128),
    "tokens": Axis(1, "tokens of the longest piece (1: decode)", high=1 << 14),
    "context": Axis(65536, "keys of the longest sequence at the end of its piece", high=1 << 21),
}


def draw_keys(op: str, seed: int, regime: str, name: str, tokens: int, first: int, device: torch.device) -> Tensor:
    """Keys or values bfloat16 [tokens, 2, 128] that begin at position `first`; see `REGIMES`."""
    shape = (tokens, histories.KV_HEADS, histories.DIM)
    scale = {"large": 1e4, "tiny": 1e-6}.get(regime, 1.0)
    drawn = normal(stream_key(op, seed, regime, name), shape, scale=scale, dtype=torch.float32, device=device)
    if regime == "correlated":
        drawn += normal(stream_key(op, seed, "mean"), shape[1:], scale=4.0, dtype=torch.float32, device=device)
    elif regime == "alternating":
        sign = 1.0 - 2.0 * (torch.arange(first, first + tokens, device=device) % 2)
        drawn += 16.0 * sign[:, None, None]
    return drawn.to(torch.bfloat16)


def make_inputs(workload: Workload, seed: int, regime: str, device: torch.device) -> dict[str, Any]:
    """Every argument by name.

    Only the last blocks before a piece have pages of their own and hold keys; the older ones, which nobody may
    need, share one page, so that a long history costs no memory.
    """
    starts, sizes = pieces(OP, seed, regime, workload)
    tokens = sum(sizes)
    keys = [-1 if start < 0 else start + size for start, size in zip(starts, sizes)]
    own_from = [max(0, start // 64 - 3) for start in starts]
    table, pages = histories.block_tables(OP, seed, keys, device, own_from=own_from)
    kv, dim = histories.KV_HEADS, histories.DIM
    shapes: dict[str, tuple[int, ...]] = {name: (pages, kv, 64, dim) for name in ("k_cache", "v_cache")}
    shapes |= {"k1_cache": (pages, kv, 4, dim), "k2_cache": (pages, kv, dim)}
    caches = {name: histories.garbage(regime, shape, device) for name, shape in shapes.items()}
    for row, start in enumerate(starts):
        first = 64 * own_from[row]
        if start > first:
            for name in ("k", "v"):
                history = draw_keys(OP, seed, regime, f"{name}{row}", start - first, first, device)
                scatter(caches[f"{name}_cache"], table[row], first, history)
            for name, (_, stride) in zip(("k1_cache", "k2_cache"), WINDOWS):
                begin, end = first // stride, max(0, start // stride - 1)
                if end > begin:
                    scatter(
                        caches[name],
                        table[row],
                        begin,
                        normal(stream_key(seed, name), (end - begin, kv, dim), device=device),
                    )
    args: dict[str, Any] = {name: draw_keys(OP, seed, regime, name, tokens, 0, device) for name in ("k", "v")}
    if regime == "padded":
        for row, start in enumerate(starts):
            if start < 0:
                args["k"][sum(sizes[:row]) : sum(sizes[: row + 1])] = torch.nan
                args["v"][sum(sizes[:row]) : sum(sizes[: row + 1])] = torch.nan
    args |= {
        "cu_seqlens": bounds(sizes, device),
        "start": torch.tensor(starts, dtype=torch.int32, device=device),
        "block_table": table,
        **{name: caches[name] for name in ("k_cache", "v_cache", "k1_cache", "k2_cache")},
    }
    if regime == "strided":
        for name in ("k", "v", "block_table", "k_cache", "v_cache", "k1_cache", "k2_cache"):
            args[name] = histories.strided(args[name])
    return args


def reference(law: ModuleType, args: Mapping[str, Any], precision: Any) -> dict[str, Expected]:
    """The law on copies of the caches, a sequence at a time."""
    caches = Caches(law, args, precision)
    ends = args["cu_seqlens"].tolist()
    for row, start in enumerate(args["start"].tolist()):
        rows = slice(ends[row], ends[row + 1])
        if start >= 0 and rows.stop > rows.start:
            caches.append(args["k"][rows], args["v"][rows], start, args["block_table"][row])
    return caches.expected()


class Caches:
    """Copies of the four caches that the law appends to, and what it touched of them."""

    def __init__(self, law: ModuleType, args: Mapping[str, Any], precision: Any) -> None:
        """Copy `args`' caches; in float64 the compressed ones for the oracle."""
        self.law, self.precision = law, precision
        wide = precision is law.numerics.ORACLE
        names = ("k_cache", "v_cache", "k1_cache", "k2_cache")
        self.copies = {name: args[name].clone(memory_format=torch.contiguous_format) for name in names}
        if wide:
            for name in names[2:]:
                self.copies[name] = self.copies[name].double()
        self.touched = {
            name: torch.zeros(cache.shape[:-1], dtype=torch.bool, device=cache.device)
            for name, cache in self.copies.items()
        }

    def append(self, keys: Tensor, values: Tensor, start: int, table: Tensor) -> None:
        """Append a piece of one sequence, `keys` and `values` [t, KV, D] from position `start` on."""
        law, end = self.law, start + keys.shape[0]
        law.compression.append(keys, values, start, table, *self.copies.values(), self.precision)
        for name in ("k_cache", "v_cache"):
            law.paging.mark(self.touched[name], table, start, end - start)
        for name, window in zip(("k1_cache", "k2_cache"), WINDOWS):
            first, last = (law.compression.window_count(keys, *window) for keys in (start, end))
            law.paging.mark(self.touched[name], table, first, last - first)

    def expected(self) -> dict[str, Expected]:
        """What the reference says of the four caches."""
        return {name: Expected(cache, self.touched[name]) for name, cache in self.copies.items()}


def cost(workload: Workload) -> Cost:
    """Keys and values are moved once; windows that end in the piece are read back from where they begin."""
    batch, context = workload["batch"], workload["context"]
    tokens = min(workload["tokens"], context)
    start, row = context - tokens, histories.KV_HEADS * histories.DIM * 2
    completed, oldest, added = 0, start, 0
    for size, stride in WINDOWS:
        first, last = (max(0, (n - size) // stride + 1) for n in (start, context))
        completed += last - first
        added += (last - first) * size
        if last > first:
            oldest = min(oldest, first * stride)
    return Cost(
        flops=float(batch * added * row // 2),
        bytes_read=batch * (row * (2 * tokens + start - oldest) + 4 * -(-(context - oldest) // 64) + 8),
        bytes_written=batch * row * (2 * tokens + completed),
        rate="fp32",
    )


PRESETS = {
    "smoke": workloads(
        OP,
        AXES,
        "smoke",
        {"batch": 1, "tokens": 63, "context": 63},
        {"batch": 3, "tokens": 1, "context": 8192},
        {"batch": 2, "tokens": 300, "context": 1000},
    ),
    "decode": workloads(
        OP,
        AXES,
        "decode",
        *({"batch": b, "tokens": 1, "context": 65536} for b in (1, 8, 32, 128)),
        {"batch": 32, "tokens": 1, "context": 65537},
    ),
    "prefill": workloads(
        OP,
        AXES,
        "prefill",
        {"batch": 1, "tokens": 8192, "context": 8192},
        {"batch": 1, "tokens": 8192, "context": 65536},
        {"batch": 1, "tokens": 16384, "context": 131072},
        {"batch": 8, "tokens": 1024, "context": 65536},
        {"batch": 128, "tokens": 64, "context": 4096},
    ),
    "long": workloads(
        OP,
        AXES,
        "long",
        {"batch": 1, "tokens": 8192, "context": 1 << 20},
        {"batch": 32, "tokens": 1, "context": 1 << 20},
        {"batch": 1, "tokens": 1, "context": 1 << 21},
    ),
    "race": workloads(
        OP,
        AXES,
        "race",
        {"batch": 1, "tokens": 8192, "context": 1 << 19},
        {"batch": 1, "tokens": 1, "context": 1 << 19},
        {"batch": 8, "tokens": 1, "context": 1 << 17},
        {"batch": 32, "tokens": 1, "context": 1 << 15},
    ),
}

CONTRACT = Contract(
    name=OP,
    summary="sparse layer: append keys and values to the paged cache, complete the compressed keys",
    signature=signature,
    axes=AXES,
    outputs={
        "k_cache": Output(Tolerance.BITWISE, inout=True),
        "v_cache": Output(Tolerance.BITWISE, inout=True),
        "k1_cache": Output(Tolerance.ORACLE, inout=True),
        "k2_cache": Output(Tolerance.ORACLE, inout=True),
    },
    make_inputs=make_inputs,
    reference=reference,
    cost=cost,
    presets=PRESETS,
    regimes=REGIMES,
    gate_workloads=workloads(
        OP,
        AXES,
        "gate",
        *({"batch": 1, "tokens": n, "context": n} for n in (1, 31, 32, 64, 65, 127, 128, 129)),
        *({"batch": 1, "tokens": 1, "context": n} for n in (32, 33, 128, 8191, 8192, 8193)),
        {"batch": 3, "tokens": 17, "context": 208},
        {"batch": 1, "tokens": 130, "context": 448},
        {"batch": 2, "tokens": 70, "context": 1 << 21},
    ),
)
