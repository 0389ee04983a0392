"""Plots as inline SVG that uses the page's font and colours."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jaxserve.core.process.extras import extra
from jaxserve.metrics.svg_page import svg_element
from jaxserve.offline.timeline import Sample

with extra("plots"):
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

# Placeholder colours, each replaced by one of the page's.
_INK, _GRID, _FIRST, _SECOND = "#010203", "#010204", "#010205", "#010206"
_OF_THE_PAGE = {
    _INK: "currentColor",
    _GRID: "var(--grid)",
    _FIRST: "var(--first)",
    _SECOND: "var(--second)",
}
_STYLE = {
    "font.size": 9,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "text.color": _INK,
}
_BINS = 40
_PERIODS = 80


def throughput(samples: Sequence[Sample], name: str) -> str:
    """Prompt and output tokens per second over a run, stacked."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(9.0, 2.6)
        times, prompt, output = np.array(
            [(it.elapsed_s, it.prompt_tokens, it.output_tokens) for it in samples]
        ).T
        edges = np.linspace(0.0, times[-1], min(len(samples), _PERIODS + 1))
        prompt, output = (
            np.diff(np.interp(edges, times, tokens)) / edges[1] for tokens in (prompt, output)
        )
        axes.stairs(output, edges, fill=True, color=_FIRST, label="output")
        axes.stairs(
            output + prompt, edges, baseline=output, fill=True, color=_SECOND, label="prompt"
        )
        axes.set_xlim(0, edges[-1])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("seconds since the start")
        axes.set_ylabel("tokens/s")
        figure.legend(loc="outside upper right", frameon=False, ncols=2)
        return _svg(figure, name)


def histogram(values: Sequence[float], label: str, name: str) -> str:
    """Histogram of values. Integers have integer bins."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(4.4, 2.2)
        numbers = np.asarray(values)
        bins: int | np.ndarray = _BINS
        if np.issubdtype(numbers.dtype, np.integer):
            width = max(1, math.ceil((numbers.max() - numbers.min() + 1) / _BINS))
            bins = np.arange(numbers.min(), numbers.max() + width + 1, width) - 0.5
        axes.hist(numbers, bins=bins, color=_FIRST, rwidth=0.9)
        axes.set_xlabel(label)
        axes.set_ylabel("requests")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=not isinstance(bins, int)))
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        return _svg(figure, name)


def _axes(width_inches: float, height_inches: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    figure.patch.set_visible(False)
    axes = figure.add_subplot()
    axes.patch.set_visible(False)
    return figure, axes


def _svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element, in the page's colours."""
    text = svg_element(figure, name)
    for ours, pages in _OF_THE_PAGE.items():
        text = text.replace(ours, pages)
    return text
