"""The mutants of sparse decode, and those that only a piece of several tokens can show."""

from __future__ import annotations

from workbench.contract import Mutant
from workbench.mutants.dense_attention_decode import SHARED
from workbench.mutants.sparse_attention_decode import SPARSE

_CHOSEN = "chosen = blocks[rows, kv_head].long()"
_ALLOWED = "allowed = (used & (index <= positions[rows, None, None])).flatten(1)"

PREFILL = (
    Mutant(
        "choice_of_the_piece's_last_token",
        "each token has its own chosen blocks",
        "attention.py",
        _CHOSEN,
        "chosen = blocks[-1:, kv_head].expand_as(blocks[rows, kv_head]).long()",
        "few",
    ),
    Mutant(
        "not_causal",
        "a token does not see the piece's later ones",
        "attention.py",
        _ALLOWED,
        "allowed = (used & (index <= positions[-1])).flatten(1)",
    ),
    Mutant(
        "causal_from_the_piece",
        "positions count from the sequence's start, not the piece's",
        "attention.py",
        _ALLOWED,
        "allowed = (used & (index <= positions[rows, None, None] - positions[0])).flatten(1)",
        "ragged",
    ),
)

MUTANTS = (*SHARED, *SPARSE, *PREFILL)
