"""Mistakes a user can make, each told in one line that names the nearest right thing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UsageError(Exception):
    """The command line asks for something that does not exist or cannot be; shown as one line, exit code 2."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean 'batch'?` and what else there is."""
    names = list(known)
    if not names:
        return "there are none"
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    listing = ", ".join(names)
    return f"did you mean {close[0]!r}? (there are: {listing})" if close else f"there are: {listing}"
