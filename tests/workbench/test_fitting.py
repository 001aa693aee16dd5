"""Tables in narrow terminals: nothing that one would type or read off is cut."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from workbench.fitting import fitted

ROWS = (
    ("1", "triton_fused", "29,191 [26,415, 29,304]", "–", Text("FASTER than compiled 3.32× [2.76, 5.69]"), "m1"),
    ("", "eager_with_a_name", "–", "–", Text("failed gate: wrong values in out[3, 17]"), "m1234"),
)


def shown(width: int) -> str:
    table = Table("#", "variant", "µs, median [95 %]", "launch", "note", "id", title="a race")
    for row in ROWS:
        table.add_row(*row)
    console = Console(width=width, file=io.StringIO())
    console.print(fitted(table, console))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_table_that_fits_stays_as_it_is() -> None:
    assert "│ 1 │ triton_fused " in shown(160) and "launch" in shown(160)


@pytest.mark.parametrize("width", [60, 70, 80, 100])
def test_names_and_figures_stay_whole_and_empty_columns_go(width: int) -> None:
    text = shown(width)
    assert max(map(len, text.splitlines())) <= width
    for word in ("triton_fused", "eager_with_a_name", "m1234", "29,191", "[26,415,", "29,304]", "compiled", "out[3,"):
        assert word in text, word
    assert "launch" not in text and "…" not in text


def test_what_cannot_fit_is_broken_not_cut() -> None:
    letters = "".join(shown(44).split())
    assert "…" not in letters and "m1234" in letters and "eager_with_a_name" in letters
