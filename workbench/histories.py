"""Made-up histories of sequences for the contracts of the sparse layer: lengths, pages, keys, garbage.

Nothing here is drawn on a device's own generator: the same seed gives the same bits everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.paging import scatter
from reference.random import integers, normal, stream_key

BLOCK = 64
"""Keys in a page."""
KV_HEADS, HEADS, DIM = 2, 32, 128
GROUP = HEADS // KV_HEADS

REGIMES = (
    "ordinary",
    "flat",
    "large",
    "overflow",
    "equal",
    "ties",
    "steps",
    "needle",
    "recent",
    "clusters",
    "stale",
    "ragged",
    "padded",
    "strided",
)
"""What the compressed keys and queries are like. `ordinary`: independent, heads of very different sharpness.
`flat`: every score within a few per cent. `large`: logits of ±60. `overflow`: more free blocks than can be chosen have
a score past the largest float. `equal`: all scores the same. `ties`: a few levels, each shared by many blocks.
`steps`: blocks about a bfloat16 step apart. `needle`: one head points at single blocks and nothing else
matters. `recent`: the newest coarse keys take half of the heads, so that whether one more or
one fewer of them is seen decides. `clusters`: neighbouring keys alike. `stale`: rows not yet complete hold attractive
keys instead of NaN. `ragged`, `padded`, `strided`: as `ordinary`, with other lengths and layouts."""


def lengths(op: str, seed: int, regime: str, batch: int, longest: int) -> list[int]:
    """Keys of each sequence: all `longest`, or from 1 to it where ragged; −1 for every second where padded."""
    if regime not in ("ragged", "padded"):
        return [longest] * batch
    drawn = integers(stream_key(op, seed, regime, "lengths"), (batch,), longest).tolist()
    found = [longest, *(1 + value for value in drawn[1:])]
    return [-1 if regime == "padded" and i % 2 else value for i, value in enumerate(found)]


def block_tables(
    op: str, seed: int, keys: list[int], device: torch.device, *, own_from: list[int] | None = None
) -> tuple[Tensor, int]:
    """Block table int32 [B, pages of the longest + 2] and the number of pages, a few of them nobody's.

    Pages are dealt in random order; −1 past a sequence's end. Blocks before `own_from[b]` all share
    one page, for ops that never touch them: a long history then costs no memory.
    """
    starts = own_from or [0] * len(keys)
    counts = [-(-max(n, 0) // BLOCK) for n in keys]
    first = [min(start, count) for start, count in zip(starts, counts)]
    total = sum(counts) - sum(first) + 4
    order = torch.sort(integers(stream_key(op, seed, "pages"), (total,), 1 << 31), stable=True).indices
    table = torch.full((len(keys), max(counts, default=0) + 2), -1, dtype=torch.int32)
    dealt = 1
    for row, (begin, count) in enumerate(zip(first, counts)):
        table[row, :begin] = order[0].int()
        table[row, begin:count] = order[dealt : dealt + count - begin].int()
        dealt += count - begin
    return table.to(device), total


def strided(x: Tensor) -> Tensor:
    """The same contents as a view into a wider tensor: every leading dimension has a stride of its own."""
    wide = x.new_empty([size + 1 for size in x.shape[:-1]] + [x.shape[-1] + 8])
    if x.dtype.is_floating_point:
        wide.fill_(torch.nan)
    else:
        wide.fill_(-1)
    view = wide[tuple(slice(0, size) for size in x.shape)]
    view.copy_(x)
    return view


def garbage(regime: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """What a cache holds where nothing was stored: NaN, or in `stale` large keys along every query."""
    out = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
    if regime == "stale":
        out.fill_(0.0)
        out[..., 0] = 40.0
    return out


def queries(op: str, seed: int, regime: str, tokens: int, device: torch.device) -> Tensor:
    """Queries bfloat16 [tokens, 32, 128] of a regime; see `REGIMES`."""
    q = normal(stream_key(op, seed, regime, "q"), (tokens, HEADS, DIM), dtype=torch.float32, device=device)
    within = torch.arange(HEADS, device=device) % GROUP
    if regime == "equal":
        q.zero_()
    elif regime in ("ties", "steps"):
        q.zero_()
        q[..., 0] = DIM**0.5 / 256
    elif regime == "flat":
        pass
    elif regime == "large":
        q *= 8.0
    elif regime == "overflow":
        q[..., 0] = DIM**0.5
    elif regime == "needle":
        q[:, within == 5, 1] = DIM**0.5
        q[:, within != 5, 1] = 0.0
    elif regime == "recent":
        q[:, within % 2 == 0, 2:4] = DIM**0.5
        q[:, within % 2 == 1, 2:4] = 0.0
    else:
        q *= torch.tensor([2.0 ** (0.2 * (head % GROUP) - 2.0) for head in range(HEADS)], device=device)[:, None]
    if regime == "stale":
        q[..., 0] = DIM**0.5
    return q.to(torch.bfloat16)


def window_means(op: str, seed: int, regime: str, sequence: int, rows: int, device: torch.device) -> Tensor:
    """Means of every 16 keys of a sequence, float32 [rows, 2, 128], each exact in bfloat16; see `REGIMES`.

    k1 and k2 follow from them by `compressed`, far cheaper than from the keys themselves.
    """
    key = stream_key(op, seed, regime, "means", sequence)
    scale = {"flat": 0.25, "large": 4.0, "needle": 0.25, "overflow": 0.25}.get(regime, 2.0)
    means = normal(key, (rows, KV_HEADS, DIM), scale=scale, device=device).float()
    row = torch.arange(rows, device=device)
    block, blocks = row // 4, -(-rows // 4)
    sign = (1.0 - 2.0 * (row % 4 // 2))[:, None]  # cancels within a block: seen by k1, not by k2

    def each_block(name: str, high: int) -> Tensor:
        """One integer below `high` for every row's block and each group, [rows, 2]."""
        return integers(stream_key(op, seed, regime, name, sequence), (blocks, KV_HEADS), high, device=device)[block]

    if regime == "ties":
        means[..., 0] = each_block("level", 6) * 32.0
    elif regime == "steps":
        means[..., 0] = each_block("step", 256).float()
    elif regime == "overflow":
        means[..., 0] = each_block("height", 8).clamp_max(3) * 60.0 * sign
    elif regime == "needle":
        means[..., 1] = (each_block("needle", 3) == 0) * (each_block("height", 128) / 16.0)
    elif regime == "recent":
        last = rows // 4 - 1
        for back, height in enumerate((10.0, 6.0, 3.0)):
            means[block == last - back, :, 2] = height
        means[..., 2] *= block[:, None] > last - 3
        means[..., 3] = (each_block("height", 128) / 16.0) * (each_block("spike", 2) == 0) * sign
    elif regime == "clusters":
        means = means[row // 7 * 7]
    elif regime == "stale":
        means[..., 0] = 0.0
    return means


def compressed(means: Tensor) -> tuple[Tensor, Tensor]:
    """k1 [n1, 2, 128] and k2 [n2, 2, 128] bfloat16, from the means of every 16 keys [n//16, 2, 128] float32."""
    fine = (means[:-1] + means[1:]) * 0.5 if means.shape[0] > 1 else means[:0]
    coarse = means[:0]
    count = max(0, means.shape[0] // 4 - 1)
    if count:
        quads = means[: 4 * count + 4].reshape(count + 1, 4, KV_HEADS, DIM)
        sums = (quads[:, 0] + quads[:, 1]) + (quads[:, 2] + quads[:, 3])
        coarse = (sums[:-1] + sums[1:]) * 0.125
    return fine.to(torch.bfloat16), coarse.to(torch.bfloat16)


def compressed_caches(
    op: str, seed: int, regime: str, keys: list[int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Block table, k1 cache and k2 cache of sequences with `keys` keys each (−1: none), garbage elsewhere."""
    table, pages = block_tables(op, seed, keys, device)
    k1_cache = garbage(regime, (pages, KV_HEADS, 4, DIM), device)
    k2_cache = garbage(regime, (pages, KV_HEADS, DIM), device)
    for row, count in enumerate(keys):
        k1, k2 = compressed(window_means(op, seed, regime, row, max(count, 0) // 16, device))
        scatter(k1_cache, table[row], 0, k1)
        scatter(k2_cache, table[row], 0, k2)
    return table, k1_cache, k2_cache
