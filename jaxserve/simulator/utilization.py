"""Utilization: the arithmetic and the memory traffic that steps need, over what devices could do.

Padding, which is computed as well, is not counted. Attention is counted by causal pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.core.steps.plan import StepPlan
from jaxserve.core.steps.work import StepWork, pairs_seen
from jaxserve.simulator.step_times import StepTimes


class CountedTimes:
    """Step times that also count what steps need of one device, on average over the stages.

    Attributes:
        flops: floating-point operations.
        num_bytes: weights and KV that are read.
        num_tokens: tokens of all steps.
        num_steps: steps.
    """

    def __init__(self, times: StepTimes, work: StepWork) -> None:
        self.flops = self.num_bytes = 0.0
        self.num_tokens = self.num_steps = 0
        self._times = times
        self._work = work
        self._flops_per_token = 2 * work.weights_per_token / work.seq
        self._kv_bytes = work.kv_bytes / work.seq

    def step(self, key: ProgramKey, plans: Sequence[StepPlan]) -> float:
        work = self._work
        entering = plans[-1]  # It passes through every stage, so it is counted once.
        if not entering.empty:
            chunks = (*entering.decodes, *entering.prefills)
            tokens = entering.num_tokens
            sampled = sum(chunk.samples * (1 + chunk.num_drafts) for chunk in chunks)
            self.num_steps += 1
            self.num_tokens += tokens
            self.flops += self._flops_per_token * tokens + 2 * work.head_weights * sampled
            self.num_bytes += work.weight_bytes(tokens) + work.head_bytes
            for window, num_layers in work.windows.items():
                stops = [c.start + c.num_tokens + c.num_drafts for c in chunks]
                self.flops += num_layers * sum(
                    work.prefill_attention(key.prefill_tokens, chunk.start, stop, window)
                    for chunk, stop in zip(entering.prefills, stops[len(entering.decodes) :])
                )
                pairs = sum(
                    pairs_seen(chunk.start, stop, window)
                    for chunk, stop in zip(entering.decodes, stops)
                )
                self.flops += 4 * work.query_size * num_layers * pairs / work.seq
                read = sum(stop if window is None else min(stop, window) for stop in stops)
                self.num_bytes += self._kv_bytes * num_layers * read
        return self._times.step(key, plans)

    def copy(self, num_pages: int) -> float:
        return self._times.copy(num_pages)
