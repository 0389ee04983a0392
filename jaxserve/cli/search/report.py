"""The report of `jaxserve search`: tables, or one JSON object."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.cli.search.command import serve_command
from jaxserve.cli.search.deployments import Dropped, Planned, SharedLoad
from jaxserve.core.process.tables import table
from jaxserve.simulator.deployments.capacity import FEWEST_ROUNDS, rate_at
from jaxserve.simulator.deployments.search import Outcome, front, winner
from jaxserve.simulator.deployments.slo import Slo

_MAX_REASONS = 4


@dataclasses.dataclass(frozen=True)
class Findings:
    """All that a search found.

    Attributes:
        planned: deployments that fit their devices.
        dropped: those that cannot be.
        found: outcomes of `planned`, by their numbers.
        priced: whether costs are those of prices, and not numbers of devices.
    """

    planned: Sequence[Planned]
    dropped: Sequence[Dropped]
    found: Mapping[int, Outcome]
    load: SharedLoad
    slo: Slo
    priced: bool

    @functools.cached_property
    def front(self) -> list[int]:
        return front([each.candidate for each in self.planned], self.found)

    @functools.cached_property
    def winner(self) -> int | None:
        return winner([each.candidate for each in self.planned], self.found)

    def rate(self, number: int) -> float | None:
        """The capacity of a deployment in requests per second."""
        step = self.found[number].step
        return None if step is None else rate_at(step, self.load.rate)

    def command(self, number: int) -> str:
        """What starts a deployment."""
        planned = self.planned[number]
        choice = planned.choice
        return serve_command(planned.asked, choice.replicas, choice.prefill_replicas)

    def manifest(self, image: str) -> str:
        """The winner, for Kubernetes."""
        return self.planned[self.winner].manifest(image)

    def shortfall(self) -> str | None:
        """Why no deployment is good enough, and the best that there is; None if one is."""
        if self.winner is not None:
            return None
        asked = f"{self.load.rate:,.2f} requests/s"
        within = ", ".join(limit.text for limit in self.slo.limits)
        if self.front:
            best = max(self.front, key=lambda number: self.found[number].step)
            return (
                f"no deployment serves {asked} within {within}; the most is "
                f"{self.rate(best):,.2f} requests/s, by {self._named(best)}."
            )
        # Without a front every outcome is `unmet`, and has values.
        best = min(self.found, key=lambda number: self._over(self.found[number].values))
        reached = ", ".join(
            f"{limit} {limit.shown(value)}"
            for limit, value in zip(self.slo.limits, self.found[best].values)
            if value is not None
        )
        return (
            f"no deployment meets {within} at any rate; the best that can be had is {reached}, by "
            f"{self._named(best)}."
        )

    def warnings(self) -> list[str]:
        """Why the load has too few requests to trust the outcome, and what is compared that only
        partly was measured."""
        warnings, count = [], self.load.count
        measured = sum(each.measured for each in self.planned)
        if 0 < measured < len(self.planned):
            warnings.append(
                f"{measured:,} of {len(self.planned):,} deployments have measured step times, and "
                "the others modelled ones, whose error is not known; compare them with care."
            )
        for limit in self.slo.limits:
            if limit.metric != "itl" and count < limit.fewest_requests:
                warnings.append(
                    f"{limit} of {count:,} requests is that of the worst of them; add "
                    f"--num-requests {limit.fewest_requests:,} or more."
                )
        if self.winner is not None:
            step = self.found[self.winner].step
            at_once = self.planned[self.winner].engine.at_once(self.slo, step)
            if count < FEWEST_ROUNDS * at_once:
                warnings.append(
                    f"the best deployment has {at_once:,.0f} requests at once, and a load of "
                    f"{count:,} ends before their queue is seen, so that its capacity may be less; "
                    f"add --num-requests {math.ceil(FEWEST_ROUNDS * at_once):,} or more."
                )
        return warnings

    def tables(self) -> str:
        """The front, what became of the others, and the command of the winner."""
        parts = [table(self._front_rows())] if self.front else []
        parts.append(table(self._counts()))
        parts += ["\n".join(reasons)] if (reasons := self._reasons()) else []
        if self.winner is not None:
            parts.append(f"best: {self.command(self.winner)}")
        return "\n\n".join(parts)

    def as_json(self) -> dict[str, Any]:
        limits = list(map(str, self.slo.limits))

        def told(number: int) -> dict[str, Any]:
            outcome, bounds = self.found[number], self.planned[number].candidate.bounds
            return self.planned[number].as_json() | {
                "outcome": outcome.kind,
                "requests_per_s": self.rate(number),
                "most_requests_per_s": rate_at(bounds.last_step, self.load.rate),
                "latency_us": bounds.latency_us,
                "values": outcome.values and dict(zip(limits, outcome.values)),
                "simulations": outcome.simulations,
                "command": self.command(number),
            }

        return {
            "load_requests_per_s": self.load.rate,
            "winner": self.winner,
            "front": self.front,
            "deployments": [told(number) for number in range(len(self.planned))],
            "dropped": [
                dataclasses.asdict(each.choice) | {"reason": each.reason} for each in self.dropped
            ],
        }

    def _front_rows(self) -> list[tuple[str, ...]]:
        formats, kv_formats = (
            {each.choice.settings[name] for each in self.planned}
            for name in ("quantization", "kv_cache_dtype")
        )
        heading = ["", "devices", "mesh", "scheduler", "tokens", "seqs"]
        heading += ["weights"] if len(formats) > 1 else []
        heading += ["KV"] if len(kv_formats) > 1 else []
        drafts = [_drafts(each.choice.settings) for each in self.planned]
        heading += ["drafts"] if len(set(drafts)) > 1 else []
        heading += ["cost/h", "per 1,000 requests"] if self.priced else []
        heading += ["requests/s", "alone", *map(str, self.slo.limits)]
        rows = [tuple(heading)]
        for number in self.front:
            planned, outcome, rate = self.planned[number], self.found[number], self.rate(number)
            choice, settings, cost = planned.choice, planned.choice.settings, planned.candidate.cost
            row = ["best" if number == self.winner else ""]
            row += [f"{choice.num_devices} x {planned.described.spec.name}", choice.mesh]
            row += [settings["scheduler"], f"{settings['max_num_batched_tokens']:,}"]
            row += [f"{settings['max_num_seqs']:,}"]
            row += [str(settings["quantization"] or "none")] if len(formats) > 1 else []
            row += [settings["kv_cache_dtype"]] if len(kv_formats) > 1 else []
            row += [drafts[number]] if len(set(drafts)) > 1 else []
            row += [f"{cost:,.2f}", f"{cost / 3.6 / rate:,.4f}"] if self.priced else []
            row += [f"{rate:,.2f}", f"{planned.candidate.bounds.latency_us / 1e6:,.2f} s"]
            row += [limit.shown(v) for limit, v in zip(self.slo.limits, outcome.values)]
            rows.append(tuple(row))
        return rows

    def _counts(self) -> list[tuple[str, str]]:
        kinds = collections.Counter(outcome.kind for outcome in self.found.values())
        too_large = sum(each.too_large for each in self.dropped)
        simulated = sum(1 for outcome in self.found.values() if outcome.simulations)
        simulations = sum(outcome.simulations for outcome in self.found.values())
        rows = [
            ("the load's own rate", f"{self.load.rate:,.2f} requests/s"),
            ("deployments", f"{len(self.planned) + len(self.dropped):,}"),
            ("have measured step times", f"{sum(each.measured for each in self.planned):,}"),
            ("do not fit the memory of their devices", f"{too_large:,}"),
            ("have settings that do not combine", f"{len(self.dropped) - too_large:,}"),
            ("meet the SLO at no rate", f"{kinds['unmet']:,}"),
            ("cannot be better than another", f"{kinds['dominated']:,}"),
            ("on the Pareto front", f"{len(self.front):,}"),
            ("simulated", f"{simulated:,}, {simulations:,} times in all"),
        ]
        return [row for row in rows if row[1] != "0"]

    def _reasons(self) -> list[str]:
        """Why settings do not combine: the most frequent reasons."""
        reasons = (each.reason for each in self.dropped if not each.too_large)
        counted = collections.Counter(reasons).most_common()
        lines = [f"{count:,} x {reason}" for reason, count in counted[:_MAX_REASONS]]
        left = sum(count for _, count in counted[_MAX_REASONS:])
        return [*lines, f"{left:,} x other reasons (--json)"] if left else lines

    def _named(self, number: int) -> str:
        choice = self.planned[number].choice
        device = self.planned[number].described.spec.name
        return f"{choice.num_devices} x {device} ({choice.mesh})"

    def _over(self, values: Sequence[float | None]) -> float:
        pairs = zip(self.slo.limits, values)
        return max((limit.over(value) for limit, value in pairs if value is not None), default=0)


def _drafts(settings: Mapping[str, Any]) -> str:
    """The number of drafts of a deployment."""
    speculative = settings.get("speculative_config")
    return "0" if speculative is None else str(speculative.num_speculative_tokens)
