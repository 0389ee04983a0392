"""Report of a batch job as a self-contained HTML page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from jaxserve.core.errors import BatchError
from jaxserve.core.version import __version__
from jaxserve.metrics.statistics import percentile
from jaxserve.metrics.svg_page import html_page
from jaxserve.offline.reports.plots import histogram, throughput
from jaxserve.offline.run import BatchRun
from jaxserve.offline.timeline import duration

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1d2733; --quiet: #5b6875; --grid: #d9dee4;
  --first: #2f6fde; --second: #f0a53c; --bad: #c0392b; }
@media (prefers-color-scheme: dark) { :root { --page: #14181d; --ink: #e4e9ee; --quiet: #98a4b0;
  --grid: #39424c; --first: #6ea2ff; --second: #d98f28; --bad: #ff7a6b; } }
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 60rem; margin: 2rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
.quiet { color: var(--quiet); }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr));
  gap: 1rem; margin: 1.5rem 0; }
.numbers div { border-left: 3px solid var(--first); padding-left: .7rem; }
.numbers .bad { border-color: var(--bad); }
.numbers b { display: block; font-size: 1.35rem; line-height: 1.3; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr));
  gap: 1rem; }
figure { margin: 0; } figcaption { color: var(--quiet); }
svg { width: 100%; height: auto; } svg text { font-family: inherit !important; }
table { border-collapse: collapse; width: 100%; }
td, th { border-bottom: 1px solid var(--grid); padding: .3rem .6rem .3rem 0; text-align: left;
  vertical-align: top; overflow-wrap: anywhere; font-weight: normal; }
th { color: var(--quiet); white-space: nowrap; } td:last-child { width: 99%; }
"""


def write_report(path: Path, run: BatchRun, command: str | None = None) -> None:
    """Write the report to a file, with the command line of the run. Raises BatchError if that
    fails."""
    try:
        path.write_text(report(run, command), encoding="utf-8")
    except OSError as error:
        raise BatchError(f"the report {path} cannot be written: {error.strerror}.") from error


def report(run: BatchRun, command: str | None = None) -> str:
    """The report: when and how the job ran, progress, throughput, lengths of prompts and outputs,
    latencies, replicas and errors."""
    job, totals = run.job, run.totals
    title = f"{job.input.name} → {job.output.name}"
    left = len(job.lines) - totals.lines
    state = "All lines are done" if run.complete else f"{left:,} lines are left"
    start, end = _utc(run.started), _utc(run.ended)
    heading = f"{state}. jaxserve {__version__}, {start} to {end}."
    origin = [
        *([("command", command)] if command else []),
        ("jaxserve", __version__),
        ("start of the job", _utc(job.created)),
        ("start of this run", start),
        ("end of this run", end),
    ]
    body = "\n".join(
        [
            f'<h1>{html.escape(title)}</h1><p class="quiet">{html.escape(heading)}</p>',
            _numbers(run),
            *_plots(run),
            *_replicas(run),
            *_errors(run),
            "<h2>Settings</h2>",
            _table([("input", job.input), ("output", job.output), *origin, *_settings(run)]),
        ]
    )
    return html_page(title, _STYLE, body)


def _numbers(run: BatchRun) -> str:
    totals = run.totals
    cells = [
        (f"{totals.lines:,}", "lines", ""),
        (f"{totals.num_errors:,}", "errors", "bad" if totals.errors else ""),
        (f"{totals.num_prompt_tokens:,}", "prompt tokens", ""),
        (f"{totals.num_output_tokens:,}", "output tokens", ""),
    ]
    if run.done:
        last = run.timeline.samples[-1]
        cells += [
            (duration(last.elapsed_s), f"for {run.done:,} lines of this run", ""),
            (f"{last.tokens / last.elapsed_s:,.0f}", "tokens/s", ""),
            (f"{last.output_tokens / last.elapsed_s:,.0f}", "output tokens/s", ""),
            (f"{run.cached_share:.0%}", "prompt tokens from the cache", ""),
        ]
    shown = (
        f'<div class="{kind}"><b>{html.escape(value)}</b>{html.escape(name)}</div>'
        for value, name, kind in cells
    )
    return f'<div class="numbers">{"".join(shown)}</div>'


def _plots(run: BatchRun) -> Iterable[str]:
    if run.done and len(run.timeline.samples) > 1:
        yield "<h2>Throughput of this run</h2>"
        yield _figure(throughput(run.timeline.samples, "throughput"), "")
    histograms = [
        ("Lengths of prompts", "tokens", run.totals.prompt_tokens),
        ("Lengths of answers", "tokens", run.totals.output_tokens),
        ("From a request's first step to its last", "s", np.array(run.latency_us) / 1e6),
        ("Between the tokens of a request, mean", "ms", np.array(run.token_us) / 1e3),
    ]
    figures = [
        _figure(histogram(values, unit, f"histogram{number}"), f"{name}: {_spread(values, unit)}")
        for number, (name, unit, values) in enumerate(histograms)
        if len(values)
    ]
    if figures:
        yield "<h2>Lengths and times</h2>"
        yield f'<div class="plots">{"".join(figures)}</div>'


def _replicas(run: BatchRun) -> Iterable[str]:
    if run.replicas:
        yield "<h2>Replicas of this run</h2>"
        rows = [
            (each.index, f"{each.num_finished:,}", each.num_losses, each.state, each.process)
            for each in run.replicas
        ]
        yield _table(rows, ("replica", "requests finished", "times lost", "state", "process"))


def _errors(run: BatchRun) -> Iterable[str]:
    if run.totals.errors:
        yield "<h2>Errors</h2>"
        rows = run.totals.errors.most_common()
        yield _table(
            [(code, f"{count:,}", run.totals.examples[code]) for code, count in rows],
            ("code", "lines", "one of them"),
        )


def _settings(run: BatchRun) -> Iterable[tuple[str, str]]:
    for name, value in run.job.settings.items():
        yield name, ", ".join(value) if isinstance(value, list) else str(value)


def _utc(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _spread(values: Sequence[float], unit: str) -> str:
    found = [percentile(values, percent) for percent in (50, 90, 99)]
    p50, p90, p99 = (f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in found)
    return f"p50 {p50}, p90 {p90}, p99 {p99} {unit}."


def _table(rows: Iterable[Sequence[object]], head: Sequence[str] = ()) -> str:
    lines = []
    if head:
        lines.append("".join(f"<th>{html.escape(name)}</th>" for name in head))
    for first, *others in rows:
        cells = "".join(f"<td>{html.escape(str(cell))}</td>" for cell in others)
        lines.append(f"<th>{html.escape(str(first))}</th>{cells}")
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
