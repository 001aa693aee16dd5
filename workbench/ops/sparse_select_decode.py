"""sparse_select_decode: the blocks that one new token a sequence attends to in a sparse layer."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from jaxtyping import BFloat16, Int32
from torch import Tensor

from workbench import histories
from workbench.contract import Axis, Contract, Cost, Expected, Output, Tolerance, Workload, workloads

OP = "sparse_select_decode"


def signature(
    q: BFloat16[Tensor, "batch 32 128"],
    lengths: Int32[Tensor, "batch"],
    block_table: Int32[Tensor, "batch pages_of_a_sequence"],
    k1_cache: BFloat16[Tensor, "pages 2 4 128"],
    k2_cache: BFloat16[Tensor, "pages 2 128"],
    blocks: Int32[Tensor, "batch 2 chosen"],
    init_blocks: int,
    local_blocks: int,
) -> None:
    """Choose the blocks of 64 keys that each sequence's newest token attends to, once for 16 query heads.

    `lengths[b]` = n keys, the new token's own included, so that its position is p = n−1 and its block q_b = ⌊p/64⌋.
    Row j of k1 (the mean of keys 16j … 16j+31, j < ⌊n/16⌋−1) lies in `k1_cache[block_table[b, j//4], :, j%4]`, row c
    of k2 (keys 64c … 64c+127, c < ⌊n/64⌋−1) in `k2_cache[block_table[b, c]]`. What lies elsewhere in the caches, and
    in rows not complete yet, may be anything, NaN included. With a_j = q·k1_j/√128 and b_c = q·k2_c/√128 the
    score of j is the sum over the group's heads of exp(a_j − log Σ_c exp(b_c)), rounded to bfloat16 (0 where no c
    exists); a block's score is the maximum over j = 4b−1 … 4b+3. The first `init_blocks`, the own block
    and the `local_blocks` before it are forced. `blocks[b, g]` is the K = blocks.shape[-1] best, the forced among
    them, ascending, −1 in the unused tail. Any choice among scores within one step of bfloat16 is right.

    Mutated: `blocks` of the sequences whose length is not −1 (padding: its row is left alone).
    """


AXES = {
    "batch": Axis(1, "sequences, one token each", high=128),
    "context": Axis(65536, "keys of the longest sequence, the new one included", high=1 << 21),
    "chosen": Axis(96, "blocks chosen, the forced ones included", low=2, high=512),
    "init_blocks": Axis(1, "first blocks that are forced", low=0, high=8),
    "local_blocks": Axis(32, "blocks before the own one that are forced", low=0, high=128),
}


def make_inputs(workload: Workload, seed: int, regime: str, device: torch.device) -> dict[str, Any]:
    """Every argument by name; see `workbench.histories.REGIMES`."""
    batch = workload["batch"]
    keys = histories.lengths(OP, seed, regime, batch, workload["context"])
    table, k1_cache, k2_cache = histories.compressed_caches(OP, seed, regime, keys, device)
    q = histories.queries(OP, seed, regime, batch, device)
    blocks = torch.empty((batch, histories.KV_HEADS, workload["chosen"]), dtype=torch.int32, device=device)
    if regime == "padded":
        q[1::2] = torch.nan
    if regime == "strided":
        q, table, k1_cache, k2_cache, blocks = map(histories.strided, (q, table, k1_cache, k2_cache, blocks))
    return {
        "q": q,
        "lengths": torch.tensor(keys, dtype=torch.int32, device=device),
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
    for row, keys in enumerate(args["lengths"].tolist()):
        if keys >= 0:
            selected.add(slice(row, row + 1), args["block_table"][row], keys, keys - 1)
    return {"blocks": selected.expected()}


class Selected:
    """Choices of all rows, and the facts that the judge needs: scores in float64, and how many must be chosen."""

    def __init__(self, law: ModuleType, args: Mapping[str, Any], precision: Any) -> None:
        """Nothing is touched yet; `args` are a contract's arguments, `blocks` among them."""
        self.law, self.args, self.precision = law, args, precision
        out, device = args["blocks"], args["q"].device
        lead, widest = out.shape[:2], args["block_table"].shape[1]
        self.value = torch.full(out.shape, -1, dtype=torch.int32, device=device)
        self.scores = torch.full((*lead, widest), -torch.inf, dtype=torch.float64, device=device)
        self.count = torch.zeros(lead, dtype=torch.int64, device=device)
        self.touched = torch.zeros(lead[0], dtype=torch.bool, device=device)

    def add(self, rows: slice, table: Tensor, keys: int, first: int) -> None:
        """Choose for the queries `rows`, which stand at positions first, first+1, … of a sequence of `keys` keys."""
        law, args = self.law, self.args
        positions = torch.arange(first, first + rows.stop - rows.start, device=self.value.device)
        k1 = law.paging.gather(args["k1_cache"], table, law.compression.window_count(keys, 32, 16))
        k2 = law.paging.gather(args["k2_cache"], table, law.compression.window_count(keys, 128, 64))
        # The largest of exact scores, rounded, is the largest of the rounded ones: one evaluation serves both.
        exact = law.selection.block_scores(
            args["q"][rows],
            k1,
            k2,
            positions,
            -(-keys // 64),
            init_blocks=args["init_blocks"],
            local_blocks=args["local_blocks"],
            precision=law.numerics.ORACLE,
        )
        model = self.precision is law.numerics.MODEL
        pooled = law.selection.settle(exact) if model else exact
        self.value[rows] = law.selection.choose(pooled, positions, self.value.shape[-1]).transpose(0, 1)
        own = positions // 64
        self.scores[rows, :, : exact.shape[-1]] = judged(exact, own).transpose(0, 1)
        self.count[rows] = (own + 1).clamp_max(self.value.shape[-1])[:, None]
        self.touched[rows] = True

    def expected(self) -> Expected:
        """What the reference says of `blocks`."""
        return Expected(self.value, self.touched, {"scores": self.scores, "count": self.count})


def judged(pooled: Tensor, own: Tensor) -> Tensor:
    """Block scores [KV, t, blocks] as the judge compares them, −inf after each query's `own` block [t].

    Free scores are held between 2^−110 and 2^112: beyond, float32 may flush to zero or overflow on the
    way to a sum that is in range itself, and such scores count as equal.
    """
    held = pooled.clamp(2.0**-110, 2.0**112).masked_fill(pooled == torch.inf, torch.inf)
    later = torch.arange(pooled.shape[-1], device=pooled.device) > own[:, None]
    return held.masked_fill(later, -torch.inf)


def cost(workload: Workload) -> Cost:
    """Every visible compressed key is read once and multiplied with 16 query heads."""
    batch, n = workload["batch"], workload["context"]
    rows = max(0, n // 16 - 1) + max(0, n // 64 - 1)
    heads, dim, kv = histories.HEADS, histories.DIM, histories.KV_HEADS
    return Cost(
        flops=2.0 * batch * rows * heads * dim,
        bytes_read=batch * (rows * kv * dim * 2 + heads * dim * 2 + 4 * (-(-n // 64)) + 4),
        bytes_written=batch * kv * workload["chosen"] * 4,
    )


_SMALL = {"chosen": 12, "local_blocks": 4}

PRESETS = {
    "smoke": workloads(
        OP,
        AXES,
        "smoke",
        {"batch": 1, "context": 63},
        {"batch": 3, "context": 2050, **_SMALL},
        {"batch": 2, "context": 8193},
    ),
    "decode": workloads(OP, AXES, "decode", *({"batch": b, "context": 65536} for b in (1, 8, 32, 128))),
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
        *({"batch": b, "context": c} for b, c in ((1, 1 << 19), (8, 1 << 17), (32, 1 << 15), (32, 1 << 17))),
    ),
}

CONTRACT = Contract(
    name=OP,
    summary="sparse layer, one token a sequence: score the compressed keys, pool to blocks, choose the best",
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
        *({"batch": 1, "context": n, **_SMALL} for n in (1, 64, 65, 127, 128, 129, 1535)),
        *({"batch": 1, "context": n} for n in (6143, 6144, 6145, 8191, 8192)),
        {"batch": 3, "context": 1300, **_SMALL},
        # No local window: the newest windows decide, and so does whether they are visible.
        {"batch": 2, "context": 1488, "chosen": 8, "local_blocks": 0},
        {"batch": 1, "context": 1407, "chosen": 8, "local_blocks": 0, "init_blocks": 0},
        {"batch": 1, "context": 1600, "chosen": 9, "local_blocks": 2, "init_blocks": 3},
    ),
)
