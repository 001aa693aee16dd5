"""Mutants of the block selection of one token: every rule bent by one."""

from __future__ import annotations

from workbench.contract import Mutant

_FILE = "selection.py"

COMMON = (
    Mutant(
        "window_of_32",
        "the local window is the own block and 31 before it, not 32",
        _FILE,
        "(block >= own - local_blocks)",
        "(block > own - local_blocks)",
    ),
    Mutant(
        "window_of_34",
        "the local window is one block too wide",
        _FILE,
        "(block >= own - local_blocks)",
        "(block >= own - local_blocks - 1)",
    ),
    Mutant(
        "first_block_forgotten",
        "the first block is not forced",
        _FILE,
        "(block < init_blocks)",
        "(block < 0)",
        "recent",
    ),
    Mutant(
        "first_blocks_one_more",
        "one block too many is forced at the beginning",
        _FILE,
        "(block < init_blocks)",
        "(block <= init_blocks)",
    ),
    Mutant(
        "forced_left_out",
        "all places go to free blocks, as if the window came beside them",
        _FILE,
        "pooled.masked_fill(forced, torch.inf)",
        "pooled.masked_fill(forced, -torch.inf)",
    ),
    Mutant(
        "infinite_score_wins",
        "a score that overflowed ties with the forced blocks and displaces the later of them",
        _FILE,
        "pooled = pooled.clamp_max(torch.finfo(torch.bfloat16).max)",
        "pooled = torch.where(pooled > torch.finfo(torch.bfloat16).max, torch.inf, pooled)",
        "overflow",
    ),
    Mutant(
        "count_one_short",
        "one block too few is chosen",
        _FILE,
        "stable=True).indices[..., :count]",
        "stable=True).indices[..., : count - 1]",
    ),
    Mutant(
        "count_without_window",
        "64 blocks are chosen instead of 96: the window is not added to them",
        _FILE,
        "stable=True).indices[..., :count]",
        "stable=True).indices[..., : count - count // 3]",
    ),
    Mutant(
        "lowest_scores",
        "the free blocks with the lowest scores are chosen",
        _FILE,
        "torch.sort(pooled, dim=-1, descending=True, stable=True)",
        "torch.sort(torch.where(pooled.isinf(), pooled, -pooled), dim=-1, descending=True, stable=True)",
    ),
    Mutant(
        "by_score_not_by_index",
        "the choice is left in the order of the scores",
        _FILE,
        "order.masked_fill(order > own, blocks).sort(-1).values",
        "order.masked_fill(order > own, blocks)",
    ),
    Mutant(
        "normaliser_over_k1",
        "the scores are normalised over the fine keys, as a softmax would be",
        _FILE,
        "b = (q @ coarse[:, None]).mul_(scale).masked_fill_(columns2 >= seen2, -torch.inf)",
        "b = (q @ fine[:, None]).mul_(scale).masked_fill_(columns1 >= seen1, -torch.inf)",
    ),
    Mutant(
        "no_normaliser",
        "exponentials are summed over the heads without a normaliser",
        _FILE,
        "a.sub_(normaliser).exp_()",
        "a.exp_()",
    ),
    Mutant(
        "one_normaliser_a_group",
        "the heads of a group share one normaliser",
        _FILE,
        "normaliser = torch.logsumexp(b, -1, keepdim=True)",
        "normaliser = torch.logsumexp(b, (1, 3), keepdim=True)",
    ),
    Mutant(
        "log4_correction",
        "the normaliser is corrected by log 4: every score a quarter, the same choice",
        _FILE,
        "normaliser = torch.logsumexp(b, -1, keepdim=True)",
        "normaliser = torch.logsumexp(b, -1, keepdim=True) + 1.3862943611198906",
        allowed=True,
    ),
    Mutant(
        "coarse_one_fewer",
        "the newest visible coarse key is not seen",
        _FILE,
        "seen2 = visible(positions, K2_STRIDE, end_effect)[:, None]",
        "seen2 = (visible(positions, K2_STRIDE, end_effect)[:, None] - 1).clamp_min(1)",
        "recent",
    ),
    Mutant(
        "fine_one_fewer",
        "the newest visible fine key is not seen",
        _FILE,
        "seen1 = visible(positions, K1_STRIDE, end_effect)[:, None]",
        "seen1 = visible(positions, K1_STRIDE, end_effect)[:, None] - 1",
        "clusters",
    ),
    Mutant(
        "scale_missing",
        "logits are not divided by the root of 128",
        _FILE,
        "scale = q.shape[-1] ** -0.5",
        "scale = 1.0",
    ),
    Mutant(
        "scale_of_64",
        "logits are divided by 8, as for heads of 64",
        _FILE,
        "scale = q.shape[-1] ** -0.5",
        "scale = 0.125",
    ),
    Mutant(
        "largest_head",
        "a score is the largest over the heads, not the sum",
        _FILE,
        "return weights.sum(1).masked_fill_",
        "return weights.amax(1).masked_fill_",
    ),
    Mutant(
        "maximum_before_sum",
        "each head is pooled to blocks before the heads are summed",
        _FILE,
        "    return weights.sum(1).masked_fill_((columns1 >= seen1) | (seen2 == 0), 0.0)",
        "    weights.masked_fill_((columns1 >= seen1) | (seen2 == 0), 0.0)\n"
        "    windows = torch.nn.functional.pad(weights, (1, -weights.shape[-1] % 4), value=0.0)\n"
        "    total = torch.zeros_like(weights[:, 0])\n"
        "    total[..., ::4] = windows.unfold(-1, 5, 4).amax(-1).sum(1)\n"
        "    return total",
    ),
    Mutant(
        "heads_interleaved",
        "query head h belongs to key-value head h mod 2, not h // 16",
        _FILE,
        "reshape(-1, groups, heads // groups, width).permute(1, 2, 0, 3)",
        "reshape(-1, heads // groups, groups, width).permute(2, 1, 0, 3)",
    ),
    Mutant(
        "pool_one_late",
        "a block is scored by windows 4b … 4b+4",
        _FILE,
        "padded[..., 1 : 1 + kept] = scores[..., :kept]",
        "padded[..., :kept] = scores[..., :kept]",
    ),
    Mutant(
        "pool_one_early",
        "a block is scored by windows 4b−2 … 4b+2",
        _FILE,
        "padded[..., 1 : 1 + kept] = scores[..., :kept]",
        "padded[..., 2 : 1 + kept] = scores[..., : kept - 1]",
    ),
    Mutant(
        "pool_without_straddling_start",
        "window 4b−1, which begins in the block before, is left out",
        _FILE,
        "_WINDOWS).amax(-1)",
        "_WINDOWS)[..., 1:].amax(-1)",
    ),
    Mutant(
        "pool_without_straddling_end",
        "window 4b+3, which ends in the block after, is left out",
        _FILE,
        "_WINDOWS).amax(-1)",
        "_WINDOWS)[..., :-1].amax(-1)",
    ),
    Mutant(
        "pool_mean",
        "a block's score is the mean of its windows, not the maximum",
        _FILE,
        "_WINDOWS).amax(-1)",
        "_WINDOWS).mean(-1)",
    ),
    Mutant(
        "missing_last_window",
        "the last complete window of either kind does not exist",
        "compression.py",
        "max(0, (keys - size) // stride + 1)",
        "max(0, (keys - size - 1) // stride + 1)",
        "recent",
    ),
    Mutant(
        "ties_to_the_higher",
        "of equal scores the higher block wins",
        _FILE,
        "order = torch.sort(pooled, dim=-1, descending=True, stable=True).indices[..., :count]",
        "order = pooled.shape[-1] - 1 - torch.sort(pooled.flip(-1), dim=-1, descending=True, stable=True)"
        ".indices[..., :count]",
        "ties",
        allowed=True,
    ),
    Mutant(
        "page_place_off",
        "a row of a page is read one place too far",
        "paging.py",
        "index % rows",
        "(index + 1) % rows",
    ),
)
"""Those of the prefill as well."""

MUTANTS: tuple[Mutant, ...] = COMMON
