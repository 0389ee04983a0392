"""An engine that only prefills, or only decodes: what it serves within the SLO, by simulation.

As DistServe simulates them (Zhong et al. 2024): each phase alone, under the same arrivals. Moves of
KV take no time here; `cluster/simulated.py` has them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jaxserve.core.arithmetic import cdiv
from jaxserve.core.errors import ConfigError
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.steps.buckets import TOKEN_MULTIPLE, Buckets, ProgramKey
from jaxserve.core.steps.plan import StepPlan
from jaxserve.simulator.deployments.bounds import num_decodes
from jaxserve.simulator.deployments.capacity import Bounds, Capacity, CapacitySearch, Load, rate_at
from jaxserve.simulator.deployments.deployment import Deployment
from jaxserve.simulator.deployments.placement import EngineGoodput
from jaxserve.simulator.deployments.search import EngineUnderLoad
from jaxserve.simulator.deployments.slo import Slo
from jaxserve.simulator.step_times import StepTimes

_OF_ONE_ROLE = ("ttft", "itl", "tpot")
"""Metrics that one role alone decides."""


class DecodeTimes:
    """Step times in which prefills take none: their KV comes from elsewhere."""

    def __init__(self, times: StepTimes, buckets: Buckets) -> None:
        self._times = times
        self._buckets = buckets

    def step(self, key: ProgramKey, plans: Sequence[StepPlan]) -> float:
        decodes = tuple(
            dataclasses.replace(plan, prefills=()) if plan.prefills else plan for plan in plans
        )
        if any(not plan.empty for plan in decodes):
            key = self._buckets.program(plan.shape for plan in decodes)
        elif not key.rows or any(not plan.empty for plan in plans):
            return 0.0
        else:  # No plan at all: the program itself is asked for.
            key = key._replace(prefill_tokens=0, ring=False)
        return self._times.step(key, decodes)

    def copy(self, num_pages: int) -> float:
        return self._times.copy(num_pages)


def prefill_only(engine: EngineUnderLoad) -> EngineUnderLoad:
    """The engine as it computes the prompts of its load, and the first token of each."""
    arrivals = [
        dataclasses.replace(
            arrival, params=dataclasses.replace(arrival.params, max_tokens=1, min_tokens=0)
        )
        for arrival in engine.load.arrivals
    ]
    return dataclasses.replace(engine, load=dataclasses.replace(engine.load, arrivals=arrivals))


def decode_only(engine: EngineUnderLoad) -> EngineUnderLoad:
    """The engine as it decodes its load. A prompt enters in one step, whatever its length, and its
    KV takes room."""
    deployment = engine.deployment
    config, buckets = deployment.config, deployment.buckets
    most = cdiv(config.max_model_len, TOKEN_MULTIPLE) * TOKEN_MULTIPLE
    whole = dataclasses.replace(buckets, prefill_tokens=(most,), ring_contexts={})
    entering = dataclasses.replace(
        config,
        scheduler="sarathi",
        target_step_us=None,
        max_num_batched_tokens=config.max_num_seqs * buckets.widths[-1] + most,
    )
    return dataclasses.replace(
        engine,
        deployment=dataclasses.replace(deployment, config=entering, buckets=whole),
        times=DecodeTimes(engine.times, buckets),
    )


def has_decodes(load: Load, config: EngineConfig) -> bool:
    """Whether any request of a load has a second token."""
    return any(num_decodes(load.arrivals, config))


def goodput(engine: EngineUnderLoad, slo: Slo) -> float:
    """Requests per second that an engine serves within the SLO; 0 if it meets that at no rate.

    Raises RequestError when a request can never run.
    """
    last = engine.bounds(slo).last_step
    search = CapacitySearch(engine.deployment, engine.times, engine.load, slo)
    step = search.between(None, last).step
    return 0.0 if step is None else rate_at(step, engine.load.rate)


def goodput_by_role(
    deployment: Deployment, times: StepTimes, load: Load, slo: Slo
) -> EngineGoodput:
    """Three searches for a capacity, one for each role of an engine of `deployment`, under the
    requests of `load`. Each must meet all of `slo` with what it does: the time to the first token
    is that of prefill engines, the times between tokens those of decode engines.

    Raises RequestError when a request can never run.
    """
    engine, config = EngineUnderLoad(deployment, times, load), deployment.config
    decode = math.inf
    if has_decodes(load, config):
        decode = goodput(decode_only(engine), slo)
    return EngineGoodput(
        prefill=goodput(prefill_only(engine), slo),
        decode=decode,
        both=goodput(engine, slo),
        tensor=config.tensor_parallel_size * config.context_parallel_size,
        stages=config.pipeline_parallel_size,
    )


@dataclasses.dataclass(frozen=True)
class SplitEngines:
    """Engines that only prefill, and engines that only decode, under one load: `prefill` and
    `decode` are the first of each, with their share of the load. As `EngineUnderLoad`, for
    searches."""

    prefill: EngineUnderLoad
    decode: EngineUnderLoad
    whole: EngineUnderLoad
    """One that does both, for a request alone."""

    @classmethod
    def of(cls, prefill: EngineUnderLoad, decode: EngineUnderLoad, slo: Slo) -> SplitEngines:
        """Of engines that do both, each with its share of the load. Raises ConfigError for a load
        without decodes, for limits that no role can be held to, and for KV on the host, of which
        nothing moves."""
        if decode.deployment.host_kv is not None:
            raise ConfigError(
                "kv_on is 'host', of which no replica gets what another has computed; leave it "
                "out, or set prefill_replicas to 0."
            )
        if not has_decodes(decode.load, decode.deployment.config):
            raise ConfigError(
                "no request of the load has a second token, so that there is nothing to decode; "
                "set prefill_replicas to 0."
            )
        if spanning := [str(limit) for limit in slo.limits if limit.metric not in _OF_ONE_ROLE]:
            raise ConfigError(
                f"slo has {spanning[0]}, which disaggregated prefill and decode make "
                f"together; give limits of {', '.join(_OF_ONE_ROLE)}, or set prefill_replicas to 0."
            )
        return cls(prefill_only(prefill), decode_only(decode), decode)

    def bounds(self, slo: Slo) -> Bounds:
        """Raises RequestError when a request can never run."""
        first, rest = self.prefill.bounds(slo), self.decode.bounds(slo)
        alone = (
            one if limit.metric == "ttft" else other
            for limit, one, other in zip(slo.limits, first.alone, rest.alone)
        )
        return Bounds(
            min(first.last_step, rest.last_step), self.whole.bounds(slo).latency_us, tuple(alone)
        )

    def capacity(self, slo: Slo, above: int | None, last: int) -> Capacity:
        """As `CapacitySearch.between`: what both roles serve."""
        first = self.prefill.capacity(slo, above, last)
        if first.step is None:
            return first
        rest = self.decode.capacity(slo, above, first.step)
        simulations = first.simulations + rest.simulations
        if rest.step is None:
            return dataclasses.replace(rest, simulations=simulations)
        values = tuple(max(pair) for pair in zip(first.values, rest.values))
        return Capacity(rest.step, values, simulations)

    def at_once(self, slo: Slo, step: int) -> float:
        """As `CapacitySearch.at_once`, of the role with more requests."""
        return max(self.prefill.at_once(slo, step), self.decode.at_once(slo, step))
