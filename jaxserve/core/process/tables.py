"""Tables as plain text, for terminals, pipes and Markdown files."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDE = 1_000_000
"""Characters; without a width rich cuts lines to the terminal's, or to 80 in a pipe."""


def table(rows: Sequence[Sequence[str]], markdown: bool = False) -> str:
    """Lines with aligned columns: the first left-aligned, the others right-aligned.

    With `markdown` the first row is the heading of a Markdown table.
    """
    drawn = Table(box=MARKDOWN if markdown else None, pad_edge=markdown, show_header=markdown)
    for column, heading in enumerate(rows[0]):
        drawn.add_column(Text(heading), justify="right" if column else "left", no_wrap=True)
    for row in rows[1:] if markdown else rows:
        drawn.add_row(*map(Text, row))
    text = "".join(segment.text for segment in Console(width=_WIDE).render(drawn))
    lines = [line.rstrip() for line in text.splitlines()]
    if markdown:
        lines = lines[1:-1]  # All but the box's blank edges.
        first, *others = lines[1].strip("|").split("|")
        lines[1] = "|".join(["", first, *(f"{rule[:-1]}:" for rule in others), ""])
    return "\n".join(lines)
