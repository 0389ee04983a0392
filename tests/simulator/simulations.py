"""Simulations of a tiny engine, in modules that import no JAX."""

from __future__ import annotations

import random
from typing import Any

from jaxserve.core.events import Admitted, Collected, Finished, Preempted, Transferred
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.steps.buckets import Buckets
from jaxserve.kv.tier import Tier
from jaxserve.scheduler.policies import POLICIES
from jaxserve.simulator.simulation import Arrival, LowerTier, Simulation
from jaxserve.simulator.step_times import LinearTimes
from jaxserve.simulator.transfer_worker import Link

PAGE_SIZE = 4
TIMES = LinearTimes(base_s=2e-3, token_s=1e-4, pair_s=1e-6, page_s=1e-5)
SLOW = Link(bytes_per_s=1e6, latency_s=1e-3)


def tiny_config(scheduler: str, **settings: Any) -> EngineConfig:
    """A resolved config of an engine for up to four sequences of 128 tokens."""
    return EngineConfig(
        **{
            "scheduler": scheduler,
            "max_model_len": 128,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 36,
            "page_size": PAGE_SIZE,
            "debug_kv": True,
            "target_step_us": 5_000 if scheduler == "medha" else None,
        }
        | settings
    )


def simulation(scheduler: str, num_pages: int = 41, host_pages: int = 0, **settings: Any):
    config = tiny_config(scheduler, **settings)
    buckets = Buckets.from_config(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        pipelined=config.pipeline_parallel_size > 1,
    )
    tiers = {Tier.HOST: LowerTier(host_pages, SLOW)} if host_pages else {}
    return Simulation(
        config, buckets, num_pages, TIMES, page_bytes=1000, tiers=tiers, keep_events=True
    )


def tiny_trace(seed: int = 0, count: int = 24) -> list[Arrival]:
    """Requests that share beginnings, some of several samples, and come faster than they end."""
    draw = random.Random(seed)
    common = [draw.randrange(256) for _ in range(40)]
    arrivals = []
    for number in range(count):
        own = [draw.randrange(256) for _ in range(draw.randint(1, 40))]
        tokens = common[: draw.choice([0, 16, 40])] + own
        params = SamplingParams(
            temperature=1.0,
            n=draw.choice([1, 1, 1, 2]),
            max_tokens=draw.randint(1, 24),
            ignore_eos=True,
            seed=number,
        )
        arrivals.append(Arrival(number * 3_000, tokens, params))
    return arrivals


def check(scheduler: str, **settings: Any) -> list[Any]:
    """Simulates a trace, checks that nothing is lost, and returns the events."""
    simulated, trace = simulation(scheduler, **settings), tiny_trace()
    requests = simulated.run(trace)
    records = simulated.log.records
    sequences = [output.seq for request in requests for output in request.sequence_outputs]
    assert [request.finished for request in requests] == [True] * len(trace)
    assert all(len(seq.output_token_ids) == seq.params.max_tokens for seq in sequences)
    collected = sum(len(record.sequences) for record in of(records, Collected))
    assert collected == sum(seq.params.max_tokens for seq in sequences)
    assert len(of(records, Finished)) == len(of(records, Admitted)) == len(sequences)
    times = [record.time_us for record in records if not isinstance(record, Transferred)]
    assert times == sorted(times)
    assert simulated.core.kv.pool.num_used == 0
    return records


def of(records: list[Any], kind: type) -> list[Any]:
    return [record for record in records if isinstance(record, kind)]


def check_all() -> None:
    """Every scheduler, through preemptions, prefix hits, swaps and a pipeline."""
    for scheduler in POLICIES:
        records = check(scheduler)
        assert records == check(scheduler), f"{scheduler} is not reproducible"
        assert any(record.cached_tokens for record in of(records, Admitted)), scheduler
        if scheduler not in ("static", "orca"):  # These two reserve what a sequence can ever need.
            assert of(records, Preempted), scheduler
        swapped = check(scheduler, host_pages=64, preemption="swap")
        assert any(record.target == "device" for record in of(swapped, Transferred)), scheduler
        check(scheduler, pipeline_parallel_size=2)
