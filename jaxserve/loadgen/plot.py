"""Plots of a load: latency distributions, and the run over time."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from jaxserve.core.process.extras import extra
from jaxserve.loadgen.results import Objectives, RequestResult
from jaxserve.loadgen.series import Curve, distribution, in_flight, thinned, token_rate
from jaxserve.metrics.fluidity import Deadlines
from jaxserve.metrics.svg_page import SVG_STYLE, html_page, svg_element

with extra("plots"):
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

_COLOR, _LIMIT_COLOR = "#2563eb", "#dc2626"
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: auto; padding: 1rem }
svg { width: 100%; height: auto }
pre { background: #f3f4f6; padding: 1rem; overflow-x: auto; line-height: 1.35 }
"""
"""CSS of pages with plots and tables."""


def write_plot(
    path: Path,
    results: Sequence[RequestResult],
    objectives: Objectives,
    deadlines: Deadlines,
    title: str,
    report: str,
    pool: Curve | None = None,
) -> None:
    """Plot a load to an .html, .svg or .png file; .html also includes the `report`. `pool`: the
    share of the KV pool in use over time, if it is known.

    Raises OSError.
    """
    figure = draw(results, objectives, deadlines, pool)
    if path.suffix != ".html":
        figure.suptitle(title)
        with rc_context(SVG_STYLE):
            figure.savefig(path)
        return
    drawing = svg_element(figure, "load")
    body = f"<h1>{html.escape(title)}</h1>\n{drawing}\n<pre>{html.escape(report)}</pre>"
    path.write_text(html_page(title, STYLE, body), encoding="utf-8")


def draw(
    results: Sequence[RequestResult],
    objectives: Objectives,
    deadlines: Deadlines,
    pool: Curve | None = None,
) -> Figure:
    """Panels: time to first token, between tokens, pace, requests in flight, tokens/s, and the use
    of the KV pool if that is known."""
    done = [result for result in results if result.completed]
    figure = Figure(figsize=(12, 7), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subfigures(2, 1)
    ttft, between, pace = upper.subplots(1, 3)
    flight, tokens, *use = lower.subplots(1, 2 if pool is None else 3)

    ttfts = distribution(_ms(result.ttft_us for result in done))
    _share(ttft, ttfts, "Time to first token [ms]", objectives.ttft_us, "objective")
    gaps = distribution(_ms(gap for result in done for gap in result.between_us))
    _share(between, gaps, "Time between tokens [ms]", objectives.itl_us, "objective")
    least = [result.fluid_decode_us(deadlines) for result in done]
    paces = distribution(_ms(us for us in least if us is not None), total=max(1, len(done)))
    _share(pace, paces, "Deadline per token [ms]", deadlines.decode_us, "as set")
    pace.set_ylabel("share of requests fluid at it")

    flight.step(*thinned(in_flight(results)), where="post", color=_COLOR)
    flight.set(xlabel="Time [s]", ylabel="requests in flight", ylim=(0, None))
    end_us = max(result.end_us for result in results)
    bin_us = max(1_000_000, end_us // 100)
    tokens.step(*token_rate(results, bin_us), where="post", color=_COLOR)
    tokens.set(xlabel="Time [s]", ylabel="output tokens/s", ylim=(0, None))
    for axes in use:
        axes.step(*thinned(pool), where="post", color=_COLOR)
        axes.set(xlabel="Time [s]", ylabel="KV pool in use", ylim=(0, 1.02))
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _ms(times_us: Sequence[int]) -> list[float]:
    return [us / 1000 for us in times_us]


def _share(axes: Axes, curve: Curve, label: str, limit_us: int | None, limit: str) -> None:
    """Plot a distribution, and its limit."""
    axes.step(*thinned(curve), where="post", color=_COLOR)
    axes.set(xlabel=label, ylabel="share", ylim=(0, 1.02))
    if limit_us is not None:
        axes.axvline(limit_us / 1000, color=_LIMIT_COLOR, linestyle="--", label=limit)
        axes.legend(loc="best", frameon=False)
    # Latencies have long tails: log scale, or symlog if some are 0 (tokens that arrived together).
    if min(curve[0], default=0) >= 1:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    else:
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
