"""Self-contained HTML pages with matplotlib figures."""

from __future__ import annotations

import html
import io

from jaxserve.core.process.extras import extra

with extra("plots"):
    from matplotlib import rc_context
    from matplotlib.figure import Figure

SVG_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "jaxserve"}
"""Text as text, not paths: searchable, accessible, and a tenth of the size. With a salt, the ids
of equal figures are equal."""

_NOTHING = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def svg_element(figure: Figure, name: str) -> str:
    """A figure as an SVG element. Its ids begin with `name`, so that they are unique in a page."""
    buffer = io.StringIO()
    with rc_context(SVG_STYLE):
        figure.savefig(buffer, format="svg", metadata=_NOTHING)
    # Drop the XML prologue, which is only for standalone files.
    text = buffer.getvalue()[buffer.getvalue().index("<svg") :]
    for reference in ('id="', "url(#", 'href="#'):
        text = text.replace(reference, f"{reference}{name}-")
    return text


def html_page(title: str, style: str, body: str) -> str:
    """A complete page. `title` is text, `style` CSS, and `body` HTML."""
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
