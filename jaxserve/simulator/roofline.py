"""Modelled step times: what a step computes, reads and sends, over the rates of a device.

Nothing is measured. A part of a step takes as long as its arithmetic or its memory traffic, the
longer of the two (Williams et al. 2009), each at the share of the peak that the device's file
assumes; parts follow one another. Padding is computed like tokens, as in the compiled programs, but
for experts, which it does not take.
Halves of a layer's tokens overlap (`core/steps/layer_times.py`), decodes that share a prefix read
it once, and drafts take the time of what computes them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jaxserve.core.devices import DeviceSpec
from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.core.steps.layer_times import DeviceRates, layer_times
from jaxserve.core.steps.plan import StepPlan
from jaxserve.core.steps.work import DraftWork, StepWork
from jaxserve.simulator.step_times import PrefixSharing


class Roofline:
    """Step times of an engine on devices that need not exist."""

    def __init__(
        self,
        device: DeviceSpec,
        work: StepWork,
        page_bytes: int,
        *,
        halves: Collection[ProgramKey] = (),
        shared: PrefixSharing | None = None,
        drafts: DraftWork | None = None,
    ) -> None:
        """`page_bytes`: the part of a KV page on one device. `halves`: programs that compute their
        tokens in two halves. `shared`: what decodes save that read pages together. `drafts`: what
        computes them; None for methods that only look them up.

        Raises ConfigError when the device has no rate for the engine's dtype, or none of the
        network that the engine needs.
        """
        device.check_network(work.num_devices)
        self._device, self._work, self._halves, self._shared = device, work, halves, shared
        self._rates = DeviceRates.of(device, work.dtype)
        self._page_s = 2 * page_bytes / self._rates.memory_bytes
        self._kv_bytes = work.kv_bytes / work.seq
        self._without_attention: dict[tuple[ProgramKey, float], float] = {}
        self._drafts = drafts
        self._drafter = drafts and Roofline(device, drafts.each, 0)

    def step(self, key: ProgramKey, plans: Sequence[StepPlan]) -> float:
        real = 1.0
        if self._work.expert_weights:
            widest = (len(p.decodes) * key.width + p.num_prefill_tokens for p in plans)
            real = max(widest) / key.num_tokens
        known = self._without_attention.get((key, real))
        if known is None:
            known = self._without_attention[key, real] = self._program_s(key, real)
        seconds = known + max(self._attention_s(plan, key) for plan in plans)
        if self._drafter is not None:
            seconds += self._drafts_s(key, plans)
        return seconds

    def copy(self, num_pages: int) -> float:
        return num_pages * self._page_s

    def _program_s(self, key: ProgramKey, real: float) -> float:
        """A dispatch of a program without attention, the share `real` of whose tokens is no
        padding."""
        work = self._work
        tokens = key.decode_tokens + key.prefill_tokens / work.seq
        layer = layer_times(self._device, work, tokens, real)
        layer_s = layer.halves if key in self._halves else layer.whole
        sampled = max(1, key.decode_tokens)
        head_s = self._rates.part_s(2 * work.head_weights * sampled, work.head_bytes)
        layers_s = max(1, work.num_layers) * layer_s
        return layers_s + head_s + self._device.launch_s + self._messages_s(tokens)

    def _messages_s(self, tokens: float) -> float:
        """Messages of a dispatch apart from the sums of its layers: the activations that a stage
        passes on, the queries and partial results of a split sequence."""
        work, seconds = self._work, 0.0
        if work.stages > 1:
            activations = tokens * work.hidden_size * work.itemsize
            seconds += self._device.send_s(work.stages * work.seq * work.tensor, activations)
        if work.seq > 1:
            share = 2 * (work.seq - 1)
            queries = share * tokens * work.query_size * work.itemsize
            seconds += work.num_layers * self._device.send_s(work.seq * work.tensor, queries)
        return seconds

    def _drafts_s(self, key: ProgramKey, plans: Sequence[StepPlan]) -> float:
        """The passes that draft for a dispatch, and the drafter's own prefill."""
        drafts, drafter, seconds = self._drafts, self._drafter, 0.0
        decodes = max(plans, key=lambda plan: sum(chunk.start for chunk in plan.decodes))
        passes = key.width - 1
        if not passes and drafts.always:
            passes = any(chunk.seq.num_speculative_tokens for chunk in decodes.decodes)
        if key.rows and passes:
            rows = ProgramKey(key.rows, 0, width=drafts.tokens)
            alone = StepPlan(decodes=decodes.decodes)
            seconds += passes * drafter.step(rows, (alone,))
        if key.prefill_tokens and drafts.prompts:
            prompts = tuple(StepPlan(prefills=plan.prefills) for plan in plans)
            seconds += drafter.step(ProgramKey(0, key.prefill_tokens), prompts)
        return seconds

    def _attention_s(self, plan: StepPlan, key: ProgramKey) -> float:
        """Attention of one plan in the layers of a stage: of its decodes, which may verify drafts,
        then of its prefills."""
        work, seconds = self._work, 0.0
        for window, num_layers in work.windows.items():
            flops = 4 * work.query_size * num_layers / work.seq
            kv_bytes = self._kv_bytes * num_layers
            if plan.decodes:
                pairs = read = sum(_seen(chunk.start, window) for chunk in plan.decodes)
                if key.width > 1:
                    pairs += sum(c.num_drafts * _seen(c.start, window) for c in plan.decodes)
                if plan.decode_groups and window is None and self._shared is not None:
                    read -= self._shared.saved(plan)
                seconds += self._rates.part_s(flops * pairs, kv_bytes * read)
            if plan.prefills:
                spans = [(chunk.start, chunk.start + chunk.num_tokens) for chunk in plan.prefills]
                of_layer = sum(
                    work.prefill_attention(key.prefill_tokens, start, stop, window)
                    for start, stop in spans
                )
                read = sum(stop - start + _seen(start, window) for start, stop in spans)
                seconds += self._rates.part_s(num_layers * of_layer, kv_bytes * read)
        return seconds


def _seen(position: int, window: int | None) -> int:
    """Keys that the query at a position sees."""
    return position + 1 if window is None else min(position + 1, window)
