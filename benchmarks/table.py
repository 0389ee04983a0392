"""Prints a benchmark's table."""

from __future__ import annotations

from collections.abc import Sequence


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A Markdown table: floats with two decimals, integers with separators, None as a dash."""
    texts = [tuple(columns), *(tuple(_text(cell) for cell in row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts)]
    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    lines = ["| " + " | ".join(map(str.rjust, row, widths)) + " |" for row in texts]
    print(title, "", lines[0], rule, *lines[1:], sep="\n")


def _text(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:,.2f}"
    if isinstance(cell, int):
        return f"{cell:,}"
    return str(cell)
