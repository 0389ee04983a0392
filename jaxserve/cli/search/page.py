"""The HTML page of `jaxserve search`."""

from __future__ import annotations

import html
from pathlib import Path

from jaxserve.cli.planning.simulated_load import arrivals, result
from jaxserve.cli.search.report import Findings
from jaxserve.cluster.simulated import SimulatedCluster
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
    """The tables with the Pareto front, and the winner's first engine at the load's own rate, or
    all of its engines where some only prefill.

    Raises OSError.
    """
    body = [f"<h1>{html.escape(title)}</h1>"]
    if findings.front:
        body.append(svg_element(_capacities(findings), "front"))
    body.append(f"<pre>{html.escape(findings.tables())}</pre>")
    if findings.winner is not None:
        results, pool = _run(findings, findings.winner)
        figure = draw(results, Objectives(), findings.slo.deadlines, pool)
        apart = findings.planned[findings.winner].choice.prefill_replicas
        shown = "The best" if apart else "The first engine of the best"
        body.append(f"<h2>{shown}, at the load's own rate</h2>")
        body.append(svg_element(figure, "run"))
    path.write_text(html_page(title, STYLE, "\n".join(body)), encoding="utf-8")


def _run(findings: Findings, number: int) -> tuple[list[RequestResult], Curve]:
    """The results of the first engine of a deployment, or of all where some only prefill; and the
    use of the first one's KV pool."""
    planned = findings.planned[number]
    choice, described, deadlines = planned.choice, planned.described, findings.slo.deadlines
    replicas: list[SimulatedReplica] = []

    def new_replica() -> SimulatedReplica:
        times, work = described.times, described.work
        replicas.append(SimulatedReplica.of(planned.deployment, times, work, deadlines))
        return replicas[-1]

    if choice.prefill_replicas:
        requests = findings.load.share(1)
        cluster = SimulatedCluster(
            planned.deployment,
            new_replica,
            choice.replicas,
            None,
            described.load_us,
            num_prefill=choice.prefill_replicas,
        )
        cluster.serve(arrivals(requests))
        summaries = cluster.summaries(deadlines)
    else:
        requests = findings.load.share(choice.replicas)
        replica = new_replica()
        replica.serve(arrivals(requests))
        summaries = replica.summaries()
    results = [
        result(place, request, summary)
        for place, (request, summary) in enumerate(zip(requests, summaries))
    ]
    return results, replicas[0].pool.curve


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
