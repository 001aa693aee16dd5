"""The mutants of dense decode, and those that only a piece of several tokens can show."""

from __future__ import annotations

from workbench.contract import Mutant
from workbench.mutants.dense_attention_decode import DENSE, SHARED

_SEEN = "seen = index[None, :] <= positions[rows, None]"

PREFILL = (
    Mutant("sees_the_next_key", "no key past the query is seen", "attention.py", _SEEN, _SEEN + " + 1"),
    Mutant(
        "not_causal",
        "a token does not see the piece's later ones",
        "attention.py",
        _SEEN,
        "seen = index[None, :] <= positions[-1].expand_as(positions[rows])[:, None]",
    ),
    Mutant(
        "causal_from_the_piece",
        "positions count from the sequence's start, not the piece's",
        "attention.py",
        _SEEN,
        "seen = index[None, :] <= (positions[rows, None] - positions[0])",
    ),
)

MUTANTS = (*SHARED, *DENSE, *PREFILL)
