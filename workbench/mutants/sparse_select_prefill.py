"""Mutants of the block selection of a piece of prompt: those of one token, and what a piece can get wrong besides."""

from __future__ import annotations

from workbench.contract import Mutant
from workbench.mutants.sparse_select_decode import COMMON

_FILE = "selection.py"

MUTANTS: tuple[Mutant, ...] = (
    *COMMON,
    Mutant(
        "fine_one_more",
        "a fine key is seen before its window has ended",
        _FILE,
        "seen1 = visible(positions, K1_STRIDE, end_effect)[:, None]",
        "seen1 = visible(positions, K1_STRIDE, end_effect)[:, None] + 1",
        "clusters",
    ),
    Mutant(
        "coarse_one_more",
        "a coarse key is seen before its window has ended",
        _FILE,
        "seen2 = visible(positions, K2_STRIDE, end_effect)[:, None]",
        "seen2 = visible(positions, K2_STRIDE, end_effect)[:, None] + 1",
        "recent",
    ),
    Mutant(
        "visible_one_token_late",
        "a window is seen from the token after its last key",
        _FILE,
        "(positions.long() + 1) // stride - 1",
        "positions.long() // stride - 1",
        "recent",
    ),
    Mutant(
        "everything_visible",
        "every query sees all coarse keys of the piece",
        _FILE,
        "masked_fill_(columns2 >= seen2, -torch.inf)",
        "masked_fill_((columns2 >= seen2) & (seen2 == 0), -torch.inf)",
        "recent",
    ),
    Mutant(
        "future_blocks_kept",
        "chosen blocks after the query's own stay in the list",
        _FILE,
        "order.masked_fill(order > own, blocks).sort(-1).values",
        "order.sort(-1).values",
    ),
    Mutant(
        "window_centred",
        "the blocks after the query's own are forced as well",
        _FILE,
        "& (block <= own))",
        "& (block <= own + 1))",
    ),
)
