"""Modelled step times: what a step computes, reads and sends, over the rates of a device.

Nothing is measured. A part of a step takes as long as its arithmetic or its memory traffic, the
longer of the two (Williams et al. 2009), each at the share of the peak that the device's file
assumes; parts follow one another. Padding is computed like tokens, as in the compiled programs.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.core.devices import DeviceSpec
from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.core.steps.plan import StepPlan
from jaxserve.core.steps.work import StepWork
from jaxserve.kv.offload.rates import causal_pairs


class Roofline:
    """Step times of an engine on devices that need not exist."""

    def __init__(self, device: DeviceSpec, work: StepWork, page_bytes: int) -> None:
        """`page_bytes`: the part of a KV page on one device. Raises ConfigError when the device has
        no rate for the engine's dtype."""
        self._work = work
        self._flops_per_s = device.flops_of(work.dtype) * device.compute_efficiency
        self._bytes_per_s = device.memory_bytes_per_s * device.memory_efficiency
        links = 2 if device.both_ways else 1
        self._link_bytes_per_s = links * device.link_bytes_per_s * device.link_efficiency
        self._hop_s, self._launch_s = device.hop_latency_s, device.launch_s
        self._page_s = 2 * page_bytes / self._bytes_per_s
        self._kv_bytes = work.kv_bytes / work.seq
        self._without_attention: dict[ProgramKey, float] = {}

    def step(self, key: ProgramKey, plans: Sequence[StepPlan]) -> float:
        known = self._without_attention.get(key)
        if known is None:
            known = self._without_attention[key] = self._program_s(key)
        return known + max(map(self._attention_s, plans))

    def copy(self, num_pages: int) -> float:
        return num_pages * self._page_s

    def _program_s(self, key: ProgramKey) -> float:
        """A dispatch of a program without attention."""
        work = self._work
        tokens = key.decode_tokens + key.prefill_tokens / work.seq
        hidden_bytes = work.hidden_size * work.itemsize
        layers_s = self._part_s(
            2 * work.weights_per_token * tokens,
            # Each layer reads and writes activations around attention and around its MLP.
            work.weight_bytes(tokens) + 4 * work.num_layers * hidden_bytes * tokens,
        )
        sampled = max(1, key.decode_tokens)
        head_s = self._part_s(2 * work.head_weights * sampled, work.head_bytes)
        launches_s = self._launch_s * (1 + work.num_layers)
        return layers_s + head_s + launches_s + self._messages_s(tokens, hidden_bytes)

    def _messages_s(self, tokens: float, hidden_bytes: int) -> float:
        """Collectives of a dispatch: two all-reduces of a tensor-parallel layer, the activations
        that a stage passes on, the queries and partial results of a split sequence."""
        work, seconds = self._work, 0.0
        if work.tensor > 1:
            share = 2 * (work.tensor - 1) / work.tensor
            seconds += 2 * work.num_layers * self._send_s(share * tokens * hidden_bytes)
        if work.stages > 1:
            seconds += self._send_s(tokens * hidden_bytes)
        if work.seq > 1:
            share = 2 * (work.seq - 1)
            queries = share * tokens * work.query_size * work.itemsize
            seconds += work.num_layers * self._send_s(queries)
        return seconds

    def _attention_s(self, plan: StepPlan) -> float:
        """Attention of one plan in the layers of a stage: of its decodes, then of its prefills."""
        work, seconds = self._work, 0.0
        for window, num_layers in work.windows.items():
            flops = 4 * work.query_size * num_layers / work.seq
            kv_bytes = self._kv_bytes * num_layers
            if plan.decodes:
                seen = sum(_seen(chunk.start, window) for chunk in plan.decodes)
                seconds += self._part_s(flops * seen, kv_bytes * seen)
            if plan.prefills:
                spans = [(chunk.start, chunk.start + chunk.num_tokens) for chunk in plan.prefills]
                pairs = sum(pairs_seen(start, stop, window) for start, stop in spans)
                read = sum(stop - start + _seen(start, window) for start, stop in spans)
                seconds += self._part_s(flops * pairs, kv_bytes * read)
        return seconds

    def _part_s(self, flops: float, num_bytes: float) -> float:
        return max(flops / self._flops_per_s, num_bytes / self._bytes_per_s)

    def _send_s(self, num_bytes: float) -> float:
        return self._hop_s + num_bytes / self._link_bytes_per_s


def pairs_seen(start: int, stop: int, window: int | None) -> int:
    """Pairs of a query at positions `start .. stop - 1` and a key that it sees."""
    if window is None or stop <= window:
        return causal_pairs(start, stop)
    full = max(start, window)
    return causal_pairs(start, max(start, window)) + (stop - full) * window


def _seen(position: int, window: int | None) -> int:
    """Keys that the query at a position sees."""
    return position + 1 if window is None else min(position + 1, window)
