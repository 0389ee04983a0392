"""The HTML page of `jaxserve search`."""

from __future__ import annotations

import html
from pathlib import Path

from jaxserve.cli.planning.simulated_load import arrivals, result
from jaxserve.cli.search.report import Findings
from jaxserve.core.process.extras import extra
from jaxserve.loadgen.plot import STYLE, draw
from jaxserve.loadgen.results import Objectives, RequestResult
from jaxserve.loadgen.series import Curve
from jaxserve.metrics.svg_page import html_page, svg_element
from jaxserve.simulator.replicas import SimulatedReplica

with extra("plots"):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure


def write_page(path: Path, findings: Findings, title: str) -> None:
    """The tables with the Pareto front, and the winner's first engine at the load's own rate.

    Raises OSError.
    """
    body = [f"<h1>{html.escape(title)}</h1>"]
    if findings.front:
        body.append(svg_element(_capacities(findings), "front"))
    body.append(f"<pre>{html.escape(findings.tables())}</pre>")
    if findings.winner is not None:
        results, pool = _run(findings, findings.winner)
        figure = draw(results, Objectives(), findings.slo.deadlines, pool)
        body.append("<h2>The first engine of the best, at the load's own rate</h2>")
        body.append(svg_element(figure, "run"))
    path.write_text(html_page(title, STYLE, "\n".join(body)), encoding="utf-8")


def _run(findings: Findings, number: int) -> tuple[list[RequestResult], Curve]:
    """The results of the first engine of a deployment, and the use of its KV pool."""
    planned = findings.planned[number]
    described, deadlines = planned.described, findings.slo.deadlines
    requests = findings.load.share(planned.choice.replicas)
    replica = SimulatedReplica.of(described.deployment, described.times, described.work, deadlines)
    replica.serve(arrivals(requests))
    results = [
        result(place, request, summary)
        for place, (request, summary) in enumerate(zip(requests, replica.summaries()))
    ]
    return results, replica.pool.curve


def _capacities(findings: Findings) -> Figure:
    """Costs and capacities, where these are known; the front has large dots."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    known = [number for number, outcome in findings.found.items() if outcome.step is not None]
    candidates = [findings.planned[number].candidate for number in known]
    on_front = set(findings.front)
    shown = axes.scatter(
        [candidate.cost for candidate in candidates],
        [findings.rate(number) for number in known],
        s=[60 if number in on_front else 12 for number in known],
        c=[candidate.bounds.latency_us / 1e6 for candidate in candidates],
        cmap="viridis",
    )
    figure.colorbar(shown, label="one request alone [s]")
    axes.set(
        xlabel="cost per hour" if findings.priced else "devices",
        ylabel="capacity [requests/s]",
        ylim=(0, None),
    )
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
