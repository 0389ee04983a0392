"""Prints a benchmark's table, for a terminal and for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.core.process.tables import table


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A Markdown table: floats with two decimals, integers with separators, None as a dash."""
    texts = [[_text(cell) for cell in row] for row in rows]
    print(title, "", table([columns, *texts], markdown=True), sep="\n")


def _text(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:,.2f}"
    if isinstance(cell, int):
        return f"{cell:,}"
    return str(cell)
