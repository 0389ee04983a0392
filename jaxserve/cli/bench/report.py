"""The report of `jaxserve bench serve`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from jaxserve.cli.terminal.text import milliseconds
from jaxserve.core.process.tables import table
from jaxserve.loadgen.results import FLUID, Objectives, Summary

if TYPE_CHECKING:
    from jaxserve.loadgen.draft_counts import ServerDraftCounts


def report(
    facts: Iterable[tuple[str, str]],
    summary: Summary,
    objectives: Objectives,
    drafts: ServerDraftCounts | None = None,
) -> str:
    """Tables of throughput, latencies (with the generator's own lag), goodput and fluidity, and of
    the `drafts` that the server verified.

    `facts` are rows about the endpoint, which come first.
    """
    parts = [[*facts, *_served(summary)], _latencies(summary), _quality(summary, objectives)]
    parts.append([] if drafts is None else list(drafts.rows()))
    return "\n\n".join(table(rows) for rows in parts if rows)


def _served(summary: Summary) -> list[tuple[str, str]]:
    per_second = summary.per_second
    cached = summary.cached_tokens
    return [
        ("requests", f"{summary.requests:,}"),
        ("completed", f"{summary.completed:,}"),
        *((f"failed, {reason}", f"{count:,}") for reason, count in summary.failures.items()),
        ("time", f"{summary.elapsed_us / 1e6:,.2f} s"),
        ("requests/s", f"{per_second(summary.completed):,.2f}"),
        *_counted("prompt tokens", summary.prompt_tokens, summary.asked_prompt_tokens),
        *([] if cached is None else [("of which cached", f"{cached:,}")]),
        *_counted("output tokens", summary.output_tokens, summary.asked_output_tokens),
        ("output tokens/s", f"{per_second(summary.output_tokens):,.1f}"),
        ("all tokens/s", f"{per_second(summary.prompt_tokens + summary.output_tokens):,.1f}"),
    ]


def _counted(name: str, count: int, asked: int) -> list[tuple[str, str]]:
    """Text prompts only approximate the requested length, and some servers end outputs early."""
    rows = [(name, f"{count:,}")]
    return rows if count == asked else [*rows, (f"{name} asked for", f"{asked:,}")]


def _latencies(summary: Summary) -> list[tuple[str, ...]]:
    rows = (
        ("time to first token", summary.ttft_us),
        ("between tokens", summary.between_us),
        ("per token after the first", summary.tpot_us),
        ("whole answer", summary.e2e_us),
        # Simulated requests are never late.
        ("sent late by", summary.lag_us if summary.max_lag_us else None),
    )
    return [
        ("", "p50", "p90", "p99"),
        *((name, *map(milliseconds, values)) for name, values in rows if values is not None),
    ]


def _quality(summary: Summary, objectives: Objectives) -> list[tuple[str, str]]:
    rows = []
    if summary.goodput is not None:
        limits = zip(("TTFT", "ITL", "TPOT", "e2e"), objectives.limits_us())
        kept = ", ".join(f"{name} {us / 1000:,g} ms" for name, us in limits if us is not None)
        rows += [
            (f"within {kept}", f"{summary.goodput / summary.requests:.1%}"),
            ("goodput", f"{summary.per_second(summary.goodput):,.2f} requests/s"),
        ]
    if summary.mean_fluidity is not None:
        rows += [
            ("fluidity index, mean", f"{summary.mean_fluidity:.3f}"),
            (f"fluid requests (at least {FLUID:g})", f"{summary.fluid / summary.completed:.1%}"),
        ]
        if summary.fluid_tokens_per_s is not None:
            rate = f"{summary.fluid_tokens_per_s:,.1f}"
            rows.append(("tokens/s at which 99% are fluid", rate))
    return rows
