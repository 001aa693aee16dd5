"""Mutants of the sparse layer between its projections: of each part, where the whole shows them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from workbench.contract import Mutant
from workbench.mutants import key_compression, sparse_attention_decode, sparse_select_decode

_COMPRESSION = ("k1_window_of_31", "k2_window_of_64", "sum_not_mean", "last_window_missing", "only_whole_in_piece",
                "row_one_late", "heads_swapped", "values_averaged", "values_lost", "append_one_early")  # fmt: skip
_SELECTION = ("window_of_32", "first_block_forgotten", "forced_left_out", "count_one_short", "count_without_window",
              "lowest_scores", "heads_interleaved", "pool_one_late", "ties_to_the_higher")  # fmt: skip


_ATTENTION = ("scale_missing", "heads_reversed", "gate_missing", "gate_is_silu", "gate_of_the_next_head",
              "own_block_dropped", "newest_key_missing", "half_blocks", "last_entry_dropped", "first_entry_dropped",
              "choices_of_heads_swapped")  # fmt: skip


def _of(part: str, mutants: Iterable[Mutant], names: tuple[str, ...]) -> tuple[Mutant, ...]:
    """The mutants of a part that the whole must show, named `part_name`; its own regimes are not the part's."""
    return tuple(
        dataclasses.replace(mutant, name=f"{part}_{mutant.name}", caught_by="ordinary")
        for mutant in mutants
        if mutant.name in names
    )


MUTANTS: tuple[Mutant, ...] = (
    *_of("compress", key_compression.MUTANTS, _COMPRESSION),
    *_of("select", sparse_select_decode.MUTANTS, _SELECTION),
    *_of("attend", sparse_attention_decode.MUTANTS, _ATTENTION),
    Mutant(
        "blocks_beside_the_window",
        "the window comes beside the blocks chosen by score, not within their number",
        "selection.py",
        "return choose(pooled, positions, topk_total)",
        "return choose(pooled, positions, topk_total + local_blocks)",
    ),
)
