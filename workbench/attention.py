"""What the four attention contracts share: inputs full of traps, and the call into the law.

In every regime pages that belong to nobody, and rows past a sequence's length, are NaN: they must not be read
into a result. Random numbers come from `reference.random`, so a CPU and a GPU get the same bits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from reference.random import integers, normal, stream_key
from workbench.contract import Expected

HEADS, KV_HEADS, DIM, PAGE = 32, 2, 128, 64
WIDTH = HEADS * DIM
"""Channels of the output and of its gate."""
KEY_BYTES = 2 * KV_HEADS * DIM * 2
"""A key and its value, both key-value heads, bfloat16."""
KEY_FLOPS = 4 * HEADS * DIM
"""One key seen by one token: q·k and the weighted value, two operations a multiply-add."""
ROW_BYTES, OUT_BYTES = 4 * WIDTH, 2 * WIDTH
"""Read for each token (query and gate) and written (output)."""

DENSE_REGIMES = (
    "ordinary",
    "large",
    "tiny",
    "needle",
    "correlated",
    "ties",
    "saturated",
    "ragged",
    "padded",
    "strided",
)
"""large: logits about ±100 and values past half precision's range; tiny: values near 1e-6; needle: a few keys
(the first, the newest, both sides of a block's edge) hold nearly all the weight; correlated: keys of a page nearly
alike; ties: all keys equal; saturated: gates to ±40; ragged: lengths and starts from 1 up; padded: every third
sequence −1, its rows NaN; strided: every tensor a view into a wider one, head and row strides of caches exchanged."""

SPARSE_REGIMES = (*DENSE_REGIMES, "unchosen", "few")
"""Beside the dense ones, unchosen: NaN in every block that no query chose; few: any number of chosen blocks from one
to K, so that block 0 may be missing and −1 starts anywhere."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Lengths of a batch on the host: keys and new tokens of each sequence, and which are padding."""

    keys: tuple[int, ...]
    tokens: tuple[int, ...]
    padded: tuple[bool, ...]

    @property
    def first_token(self) -> list[int]:
        """Prefix sums of the tokens, one more than there are sequences."""
        return [sum(self.tokens[:b]) for b in range(len(self.tokens) + 1)]

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Sequence and position of each packed token, int64 [T]; the position is −1 for padding."""
        sequence = torch.repeat_interleave(torch.arange(len(self.tokens)), torch.tensor(self.tokens))
        offset = torch.tensor([n - t for n, t in zip(self.keys, self.tokens, strict=True)])
        first = torch.tensor(self.first_token[:-1])
        position = torch.arange(len(sequence)) - first[sequence] + offset[sequence]
        position[torch.tensor(self.padded)[sequence]] = -1
        return sequence.to(device), position.to(device)


def make_batch(op: str, seed: int, regime: str, batch: int, keys: int, tokens: int) -> Batch:
    """Lengths: the first sequence has `keys` keys and `tokens` new tokens, ragged ones any number up to that."""
    tokens = min(tokens, keys)
    spread_keys, spread_tokens = [keys] * batch, [tokens] * batch
    if regime in ("ragged", "padded"):
        draws = integers(stream_key(op, seed, regime, "lengths"), (2, batch), 1 << 31).tolist()
        for b in range(1, batch):
            spread_tokens[b] = 1 + draws[0][b] % tokens
            spread_keys[b] = spread_tokens[b] + draws[1][b] % (keys - spread_tokens[b] + 1)
        if batch > 3:
            spread_keys[3] = spread_tokens[3]
    padded = tuple(regime == "padded" and b % 3 == 1 for b in range(batch))
    return Batch(tuple(spread_keys), tuple(spread_tokens), padded)


def _block_table(op: str, seed: int, regime: str, batch: Batch, device: torch.device) -> tuple[Tensor, int]:
    """Scattered pages of each sequence, int32 [B, max pages], −1 past its end; and how many pages there are."""
    needed = [0 if pad else -(-n // PAGE) for n, pad in zip(batch.keys, batch.padded, strict=True)]
    pages = sum(needed) + max(2, sum(needed) // 16)
    order = integers(stream_key(op, seed, regime, "pages"), (pages,), 1 << 31).argsort(stable=True).to(torch.int32)
    width = max(-(-n // PAGE) for n in batch.keys) + 1
    wide = width + 5 if regime == "strided" else width
    table = torch.full((len(needed), wide), -1, dtype=torch.int32)
    first = 0
    for b, count in enumerate(needed):
        table[b, :count] = order[first : first + count]
        first += count
    return table.to(device)[:, :width], pages


def _empty_cache(regime: str, pages: int, device: torch.device) -> Tensor:
    if regime == "strided":
        # Every second page of a cache whose pages hold [64, KV, D].
        wide = torch.full((pages, 2, PAGE, KV_HEADS, DIM), math.nan, dtype=torch.bfloat16, device=device)
        return wide[:, 1].transpose(1, 2)
    return torch.empty(pages, KV_HEADS, PAGE, DIM, dtype=torch.bfloat16, device=device)


def _spaced(rows: Tensor, before: int, after: int) -> Tensor:
    """The rows [T, width] as a view into wider ones, as a fused projection leaves them; NaN beside them."""
    count, width = rows.shape
    wide = torch.full((count, before + width + after), math.nan, dtype=rows.dtype, device=rows.device)
    wide[:, before : before + width] = rows
    return wide[:, before : before + width]


def make_caches(
    op: str, seed: int, regime: str, batch: Batch, direction: Tensor, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """`k_cache`, `v_cache` [pages, KV, 64, D] bfloat16 and `block_table`.

    `direction` [KV, D] is what needles point to.
    """
    table, pages = _block_table(op, seed, regime, batch, device)
    k_cache, v_cache = (_empty_cache(regime, pages, device) for _ in range(2))
    shape = (pages, KV_HEADS, PAGE, DIM)
    key_scale = {"large": 4.0}.get(regime, 1.0)
    value_scale = {"large": 1e5, "tiny": 1e-6}.get(regime, 1.0)
    v_cache.copy_(normal(stream_key(op, seed, regime, "v"), shape, scale=value_scale, device=device))
    if regime == "ties":
        k_cache.copy_(normal(stream_key(op, seed, regime, "k"), (KV_HEADS, 1, DIM), device=device).expand(shape))
    else:
        k_cache.copy_(normal(stream_key(op, seed, regime, "k"), shape, scale=key_scale, device=device))
    if regime == "correlated":
        common = normal(stream_key(op, seed, regime, "page"), (pages, KV_HEADS, 1, DIM), scale=1.5, device=device)
        k_cache.mul_(0.25).add_(common)
    for b, (count, pad) in enumerate(zip(batch.keys, batch.padded, strict=True)):
        if pad:
            continue
        last, rows = (count - 1) // PAGE, (count - 1) % PAGE + 1
        page = table[b, last].long()
        k_cache[page, :, rows:] = math.nan
        v_cache[page, :, rows:] = math.nan
        if regime == "needle":
            for position in {0, 63, 64, count - batch.tokens[b], count - 1} & set(range(count)):
                k_cache[table[b, position // PAGE].long(), :, position % PAGE] = direction * 1.25
    owned = torch.zeros(pages + 1, dtype=torch.bool, device=device)
    owned[table.flatten().long()] = True  # −1 falls on the entry past the last page
    stray = ~owned[:pages]
    k_cache[stray] = math.nan
    v_cache[stray] = math.nan
    return k_cache, v_cache, table


def make_queries(op: str, seed: int, regime: str, position: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """`q` [T, H, D], `gate` and `out` [T, H·D], bfloat16, by name; and the direction [KV, D] that needles point to.

    `position` int [T] is negative where a row is padding.
    """
    rows, device = position.shape[0], position.device
    scale = {"large": 8.0, "needle": 0.5, "tiny": 1e-3}.get(regime, 1.0)
    direction = normal(stream_key(op, seed, regime, "direction"), (KV_HEADS, DIM), device=device)
    q = normal(stream_key(op, seed, regime, "q"), (rows, HEADS, DIM), scale=scale, device=device)
    if regime == "needle":
        q += direction.repeat_interleave(HEADS // KV_HEADS, 0)
    gate_scale = 10.0 if regime == "saturated" else 1.0
    gate = normal(stream_key(op, seed, regime, "gate"), (rows, WIDTH), scale=gate_scale, device=device)
    q[position < 0] = math.nan
    gate[position < 0] = math.nan
    out = torch.empty(rows, WIDTH, dtype=torch.bfloat16, device=device)
    if regime == "strided":
        q = _spaced(q.flatten(1), 0, WIDTH).unflatten(1, (HEADS, DIM))
        gate, out = _spaced(gate, WIDTH, 0), _spaced(out, DIM, DIM)
    return {"q": q, "gate": gate, "out": out}, direction


def choose_blocks(
    op: str, seed: int, regime: str, sequence: Tensor, position: Tensor, count: int, overlap: int
) -> Tensor:
    """Chosen blocks as the selection leaves them, int32 [T, KV, count]: ascending, distinct, −1 in the unused tail.

    Chosen are all blocks while they fit; else block 0, the query's own block and the third of `count` before it, and
    one block from each of as many equal stretches of the rest as there are places left. `overlap` percent of
    those are the same for the (up to) 8 neighbouring tokens of a tile.
    """
    device = position.device
    rows = position.shape[0]
    own = position.clamp(min=0)[:, None, None] // PAGE
    local = count // 3
    initial = min(1, count - 1)
    free = max(0, count - initial - local - 1)
    local = count - initial - free - 1
    index = torch.arange(rows, device=device)
    tile = sequence * (1 << 32) + position // 8
    first_of_tile = torch.searchsorted(tile, tile) if rows else index
    draws = integers(stream_key(op, seed, regime, "free"), (rows, KV_HEADS, free), 1 << 31, device=device)
    shared = integers(stream_key(op, seed, regime, "overlap"), (rows, KV_HEADS, free), 100, device=device) < overlap
    draws = torch.where(shared, draws[first_of_tile], draws)
    span = own - local - 1
    stretch = torch.arange(free + 1, device=device)
    edge = 1 + span * stretch // max(free, 1)
    width = (edge[..., 1:] - edge[..., :-1]).clamp(min=1)
    parts = [torch.zeros(rows, KV_HEADS, initial, dtype=torch.int64, device=device), edge[..., :-1] + draws % width]
    parts.append((own + torch.arange(-local, 1, device=device)).expand(rows, KV_HEADS, -1))
    every = torch.arange(count, device=device)
    blocks = torch.where(own < count, every.masked_fill(every > own, 1 << 30), torch.cat(parts, -1))
    if regime == "few":
        keep = integers(stream_key(op, seed, regime, "keep"), (rows, KV_HEADS, count), 100, device=device)
        share = integers(stream_key(op, seed, regime, "share"), (rows, KV_HEADS, 1), 100, device=device)
        blocks = torch.where((keep < share) | (blocks == own), blocks, 1 << 30).sort(-1).values
    blocks = blocks.masked_fill(blocks > own, -1).to(torch.int32)
    if regime == "strided":
        wide = torch.full((rows, KV_HEADS, count + 3), -1, dtype=torch.int32, device=device)
        wide[..., :count] = blocks
        blocks = wide[..., :count]
    return blocks


def spoil_unchosen(k_cache: Tensor, v_cache: Tensor, table: Tensor, sequence: Tensor, blocks: Tensor) -> None:
    """Write NaN, in place, over every block that no query of its sequence chose, for each key-value head."""
    width = table.shape[1]
    chosen = torch.zeros(table.shape[0], KV_HEADS, width + 1, dtype=torch.bool, device=table.device)
    target = blocks.long().masked_fill(blocks < 0, width)
    heads = torch.arange(KV_HEADS, device=table.device)[None, :, None]
    chosen[sequence[:, None, None], heads, target] = True
    for head in range(KV_HEADS):
        pages = table[~chosen[:, head, :width] & (table >= 0)].long()
        k_cache[pages, head] = math.nan
        v_cache[pages, head] = math.nan


def distinct_blocks(keys: int, tokens: int, count: int, overlap: int) -> float:
    """Blocks of one key-value head that the tokens of a sequence choose together, as `choose_blocks` draws them.

    The expected number of distinct draws; with hundreds of draws the true one differs by a few percent.
    """
    last = (keys - 1) // PAGE
    if last < count:
        return last + 1
    free = max(0, count - min(1, count - 1) - count // 3 - 1)
    forced = count - free + (tokens - 1) // PAGE
    draws = (tokens + 7) // 8 + (tokens - (tokens + 7) // 8) * (1 - overlap / 100)
    stretch = max(1.0, (last - count // 3 - 1) / max(1, free))
    return min(last + 1, forced + free * stretch * (1 - (1 - 1 / stretch) ** draws))


def expected(
    law: ModuleType, args: Mapping[str, Any], precision: Any, spans: Iterable[tuple[int, int, int]]
) -> dict[str, Expected]:
    """What the law says of `out`: each sequence's rows over its gathered keys, then the gate.

    `spans` has the first row, the end row and the number of keys of each sequence in order; the rows are its last
    positions. A negative number of keys is padding. With `blocks` among `args` attention is over those, else dense.
    """
    q, gate = args["q"], args["gate"]
    kind = torch.float64 if precision is law.numerics.ORACLE else torch.bfloat16
    value = torch.zeros(gate.shape, dtype=kind, device=q.device)
    touched = torch.zeros(gate.shape[0], dtype=torch.bool, device=q.device)
    for sequence, (first, end, count) in enumerate(spans):
        if count < 0 or end == first:
            continue
        rows = slice(first, end)
        table = args["block_table"][sequence]
        keys, values = (law.paging.gather(args[name], table, count) for name in ("k_cache", "v_cache"))
        positions = torch.arange(count - (end - first), count, device=q.device)
        if "blocks" in args:
            blocks = args["blocks"][rows]
            attended = law.attention.attend_blocks(q[rows], keys, values, blocks, positions, precision)
        else:
            attended = law.attention.attend_dense(q[rows], keys, values, positions, precision)
        value[rows] = law.attention.output_gate(attended.flatten(1), gate[rows], precision)
        touched[rows] = True
    return {"out": Expected(value, touched)}


def decode_spans(args: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """Spans of a decode op: one row a sequence, `lengths[b]` keys."""
    return [(row, row + 1, count) for row, count in enumerate(args["lengths"].tolist())]


def prefill_spans(args: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """Spans of a prefill op: rows by `cu_seqlens`, `start[b]` keys more than rows; −1 where start is −1."""
    cuts = args["cu_seqlens"].tolist()
    starts = args["start"].tolist()
    return [
        (first, end, start + end - first if start >= 0 else -1)
        for first, end, start in zip(cuts[:-1], cuts[1:], starts, strict=True)
    ]


def make_inputs(op: str, seed: int, regime: str, sizes: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Arguments of any of the four ops, in call order.

    `sizes`: `batch`, `context` (keys of the longest sequence), `tokens` (a prefill op), `topk_blocks` (a sparse
    one) and `overlap` (percent, see `choose_blocks`).
    """
    prefill = "tokens" in sizes
    batch = make_batch(op, seed, regime, sizes["batch"], sizes["context"], sizes.get("tokens", 1))
    sequence, position = batch.positions(device)
    queries, direction = make_queries(op, seed, regime, position)
    k_cache, v_cache, table = make_caches(op, seed, regime, batch, direction, device)
    args: dict[str, Any] = {"q": queries["q"], "gate": queries["gate"]}
    marks = [-1 if pad else n for n, pad in zip(batch.keys, batch.padded, strict=True)]
    if prefill:
        starts = [n if n < 0 else n - t for n, t in zip(marks, batch.tokens, strict=True)]
        args["cu_seqlens"] = torch.tensor(batch.first_token, dtype=torch.int32, device=device)
        args["start"] = torch.tensor(starts, dtype=torch.int32, device=device)
    else:
        args["lengths"] = torch.tensor(marks, dtype=torch.int32, device=device)
    args["block_table"] = table
    if "topk_blocks" in sizes:
        count, overlap = sizes["topk_blocks"], sizes.get("overlap", 0)
        blocks = choose_blocks(op, seed, regime, sequence, position, count, overlap)
        if regime == "unchosen":
            spoil_unchosen(k_cache, v_cache, table, sequence, blocks)
        args["blocks"] = blocks
    return {**args, "k_cache": k_cache, "v_cache": v_cache, "out": queries["out"]}
