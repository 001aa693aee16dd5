"""Attention over chosen blocks with one rule bent at a time, beside the bends that all attention ops share."""

from __future__ import annotations

from workbench.contract import Mutant
from workbench.mutants.dense_attention_decode import SHARED

_INDEX = "index = chosen[..., None] * BLOCK + within"
_USED = "used = (chosen >= 0)[..., None]"
_ALLOWED = "allowed = (used & (index <= positions[rows, None, None])).flatten(1)"
_CHOSEN = "chosen = blocks[rows, kv_head].long()"
_KEYS = "keys[index, kv_head]"
_VALUES = "values[index, kv_head]"


def _bent(name: str, rule: str, old: str, new: str, caught_by: str = "ordinary", allowed: bool = False) -> Mutant:
    return Mutant(name, rule, "attention.py", old, new, caught_by, allowed)


SPARSE = (
    _bent(
        "unused_is_block_zero",
        "−1 is no block, not block 0",
        _CHOSEN,
        "chosen = blocks[rows, kv_head].long().clamp(min=0)",
        caught_by="few",
    ),
    _bent(
        "unused_is_the_last_block",
        "−1 is no block, not the last one as Python counts",
        _CHOSEN,
        _CHOSEN + "\n            chosen = torch.where(chosen < 0, positions[rows, None] // BLOCK, chosen)",
        caught_by="few",
    ),
    _bent(
        "last_entry_dropped",
        "all K entries count",
        _CHOSEN,
        _CHOSEN + "\n            chosen = chosen[:, : max(1, chosen.shape[1] - 1)]",
        caught_by="needle",
    ),
    _bent(
        "first_entry_dropped",
        "the first entry counts",
        _CHOSEN,
        _CHOSEN + "\n            chosen = chosen[:, min(1, chosen.shape[1] - 1) :]",
        caught_by="needle",
    ),
    _bent(
        "own_block_dropped",
        "the query's own block counts, full or not",
        _USED,
        "used = ((chosen >= 0) & (chosen < positions[rows, None] // BLOCK))[..., None]",
    ),
    _bent("newest_key_missing", "a query sees its own key", _ALLOWED, _ALLOWED.replace("<=", "<"), "needle"),
    _bent(
        "not_cut_at_the_position",
        "no key past the query is seen",
        _ALLOWED,
        "allowed = used.expand_as(index).flatten(1)",
    ),
    _bent("sees_the_next_key", "no key past the query is seen", _ALLOWED, _ALLOWED.replace("<=", "- 1 <=")),
    _bent("block_starts_one_late", "block b starts at key 64b", _INDEX, _INDEX + " + 1", "needle"),
    _bent("blocks_of_32", "a block is 64 keys", _INDEX, "index = chosen[..., None] * (BLOCK // 2) + within"),
    _bent("half_blocks", "all 64 keys of a block count", _USED, _USED + " & (within < BLOCK // 2)"),
    _bent(
        "one_choice_for_both_heads",
        "each key-value head has its own chosen blocks",
        _CHOSEN,
        _CHOSEN.replace("kv_head", "0"),
        caught_by="few",
    ),
    _bent(
        "choices_of_heads_swapped",
        "each key-value head has its own chosen blocks",
        _CHOSEN,
        _CHOSEN.replace("kv_head", "kv_head - 1"),
        caught_by="few",
    ),
    _bent(
        "dense",
        "only chosen blocks are seen",
        _CHOSEN,
        "chosen = torch.arange(-(-keys.shape[0] // BLOCK), device=q.device).expand(q[rows].shape[0], -1)",
        caught_by="few",
    ),
    _bent("values_of_the_other_head", "values come from the key's own head", _VALUES, "values[index, kv_head - 1]"),
    _bent("keys_of_the_other_head", "keys come from the value's own head", _KEYS, "keys[index, kv_head - 1]"),
    _bent("values_one_row_late", "value and key are of the same row", _VALUES, "values[index, kv_head].roll(1, 1)"),
)

MUTANTS = (*SHARED, *SPARSE)
