"""Tables in a terminal that is narrower than they are."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

NAMES = ("#", "id", "op", "variant", "rival", "axis", "preset")
"""Columns that hold what a user types: never broken."""

WORDS = (24, 16, 12, 8, 1)
"""Characters up to which a word is not broken, the first at which the table fits."""


def fitted(table: Table, console: Console) -> Table:
    """The table, if it fits; else one without frame and empty columns, its cells broken between words.

    Nothing is ever cut off.
    """
    for column in table.columns:
        column.overflow = "fold"
    if console.measure(table, options=console.options.update(width=10_000)).maximum <= console.width:
        return table
    columns = [column for column in table.columns if column.header in NAMES or _filled(column)]
    room = console.width - 2 * len(columns)
    for most in WORDS:
        widths = [_longest(column, most) for column in columns]
        if sum(widths) <= room:
            break
    wanted = [max(len(line) for cell in _cells(column) for line in cell.split("\n")) for column in columns]
    # what is left goes to those that need least, so that few cells are broken
    order = sorted(range(len(widths)), key=lambda index: wanted[index] - widths[index])
    for place, index in enumerate(order):
        share = max(0, room - sum(widths)) // (len(order) - place)
        widths[index] += max(0, min(wanted[index] - widths[index], share))
    for column, width in zip(columns, widths):
        column.width = width
    made = Table(*columns, title=table.title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    made.title_justify, made.rows = table.title_justify, table.rows
    return made


def _longest(column: Column, most: int) -> int:
    """The longest word of a column, broken at `most` characters if it is no name; at least 1."""
    longest = max((len(word) for cell in _cells(column) for word in cell.split()), default=1)
    return longest if column.header in NAMES else min(most, longest)


def _cells(column: Column) -> list[str]:
    return [str(column.header), *map(str, column.cells)]


def _filled(column: Column) -> bool:
    return any(str(cell) not in ("", "–") for cell in column.cells)
