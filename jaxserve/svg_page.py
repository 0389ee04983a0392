"""Figures of matplotlib in a page of HTML that needs nothing beside it."""

from __future__ import annotations

import html
import io

from matplotlib import rc_context
from matplotlib.figure import Figure

LETTERS = {"svg.fonttype": "none"}
"""Letters as letters: to be searched, read aloud, and a tenth of the size."""

_NOTHING = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def svg_element(figure: Figure, name: str) -> str:
    """A figure as an element. Its ids begin with `name`, for a page may have several figures."""
    buffer = io.StringIO()
    with rc_context(LETTERS):
        figure.savefig(buffer, format="svg", metadata=_NOTHING)
    # From the tag on: what comes before belongs to a file of its own.
    text = buffer.getvalue()[buffer.getvalue().index("<svg") :]
    for reference in ('id="', "url(#", 'href="#'):
        text = text.replace(reference, f"{reference}{name}-")
    return text


def html_page(title: str, style: str, body: str) -> str:
    """The whole page. `title` is text, `style` CSS, and `body` HTML."""
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width">',
            '<link rel="icon" href="data:,">',
            f"<title>{html.escape(title)}</title><style>{style}</style></head><body>",
            body,
            "</body></html>",
            "",
        ]
    )
