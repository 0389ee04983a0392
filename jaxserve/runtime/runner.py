"""Runs plans on the device: packs, calls executables, and reads results.

Only reads wait for the device, and steps with grammars: between forward and sampling they wait for
the previous tokens. Programs are dispatched one after another, each reusing the donated buffers of
the previous one, so the device runs the steps in plan order.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

import jax
import numpy as np

from jaxserve.core.sequence import Sequence
from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.core.steps.counters import ExpertLoads, RuntimeCounters
from jaxserve.core.steps.pipeline import Pipeline
from jaxserve.core.steps.plan import StepPlan
from jaxserve.core.steps.results import StepResults
from jaxserve.kv.layout import TRANSFER_PAGES, TRANSFER_SIZES
from jaxserve.models.family import Params
from jaxserve.runtime.program_kinds import ProgramKinds
from jaxserve.runtime.programs.compilation.executables import Programs
from jaxserve.runtime.programs.device_state import allocate, filled, put
from jaxserve.runtime.programs.device_step import BUBBLE, DeviceStep, PackedInputs
from jaxserve.runtime.programs.forward.forward_programs import Hidden
from jaxserve.runtime.programs.layout.frozen_plan import FrozenPlan
from jaxserve.runtime.programs.shapes.program import ProgramShapes, holding
from jaxserve.runtime.state_memory import StateMemory
from jaxserve.runtime.step_block import StepBlock
from jaxserve.runtime.step_sampler import StepSampler
from jaxserve.runtime.weights.source import WeightSource
from jaxserve.structured.matcher import TokenMatcher


class Runner:
    """Owns the devices' state, and the programs that change it.

    With pipeline stages, a step takes as many dispatches as there are stages: one stage works on it
    at a time, and each stage on a different step.
    """

    def __init__(
        self,
        shapes: ProgramShapes,
        weights: WeightSource,
        programs: Programs,
        draft_params: Params | None = None,
    ) -> None:
        self.shapes = shapes
        self._kinds = ProgramKinds(shapes)
        self._kinds.bind(programs)
        self._state = allocate(shapes.abstract_state, weights, draft_params)
        self.memory = StateMemory(self._state, shapes, self._kinds)
        self._sampler = StepSampler(self._state, shapes, self._kinds)
        self._pipeline = Pipeline(shapes.buckets, shapes.stages, BUBBLE)
        self._block = StepBlock(shapes, self._kinds)
        self.counters = self._new_counters()
        self._unread_loads: collections.deque[tuple[int, SequenceOf[jax.Array]]]
        self._unread_loads = collections.deque()
        self.num_dispatches = 0
        self.in_flight: collections.deque[DeviceStep] = collections.deque()

    @property
    def steps_ahead(self) -> int:
        """As Executor. A dispatch with streamed layers or pages ends with its step, and a step
        whose tokens are dropped would read all of them."""
        streams = self.shapes.placement.streamed or self.shapes.config.kv_on == "host"
        return 0 if streams else 1

    @property
    def weights(self) -> WeightSource:
        """The owner of the model's parameters."""
        return self._state.weights

    def _new_counters(self) -> RuntimeCounters:
        moe, host_kv, loads = self.shapes.model.moe, self._kinds.host_kv, None
        if moe is not None and host_kv is None:
            loads = ExpertLoads.of(sum(moe.sparse_layers), moe.num_experts)
        of_host_kv = {} if host_kv is None else host_kv.counters
        reads = self._state.weights.reads
        return RuntimeCounters(weight_reads=reads, expert_loads=loads, **of_host_kv)

    def close(self) -> None:
        """End what runs beside the steps. Can be called twice."""
        self._state.weights.close()

    @property
    def busy(self) -> bool:
        """Whether a dispatched step is still in the pipeline, or waits for those that share its
        reads."""
        return bool(len(self._block)) or self._pipeline.busy

    def register(
        self,
        seq: Sequence,
        seed: int,
        bad_word_ids: SequenceOf[SequenceOf[int]],
        eos_token_ids: tuple[int, ...],
        matcher: TokenMatcher | None,
    ) -> None:
        """Register a sequence before its first step. `matcher` constrains its tokens.

        Raises RequestError when its bad words have too many or too long token sequences.
        """
        self._sampler.register(seq, seed, bad_word_ids, eos_token_ids, matcher)

    def forget(self, seq: Sequence) -> None:
        self._sampler.forget(seq)

    def pack(self, plan: StepPlan, step_id: int) -> PackedInputs:
        """Fixes a plan's uploads. Raises ProgramMissError when no program holds it."""
        sampled = plan.sampled
        rows = self._sampler.rows(sampled)
        frozen = FrozenPlan.of(plan, self.shapes.kv_layout, self.shapes.trash_slot)
        return PackedInputs(step_id, plan, self._pipeline.key(plan), frozen, sampled, rows)

    def dispatch(self, packed: PackedInputs, begun_us: int | None) -> None:
        """Calls a step's programs; returns before the devices are done.

        In a pipeline the step enters the first stage, all others advance by one, and the oldest is
        completed and joins `in_flight`. Steps that share the reads of weights wait for each other:
        they run, and join it, when there are enough of them.
        """
        self.num_dispatches += 1
        if self.shapes.config.steps_per_weight_read > 1:
            if packed is not BUBBLE:
                self._block.add(packed)
            if packed is BUBBLE or self._block.full:
                self._run_block(begun_us)
            return
        self._pipeline.enter(packed)
        key, together = self._pipeline.key(), self._pipeline.plans
        self._propose(packed)
        hidden = self._record_expert_loads(self._forward(key))
        if (oldest := self._pipeline.leave()) is not None:
            self.in_flight.append(self._sampled(oldest, key, together, begun_us, hidden))

    def advance(self, begun_us: int | None = None) -> None:
        """Moves the pipeline on by one stage, with no step entering, or runs those that wait for
        others to share reads with."""
        self.dispatch(BUBBLE, begun_us)

    def _run_block(self, begun_us: int | None) -> None:
        """Runs the steps that share reads; all of them are completed."""
        alone = len(self._block) == 1
        for packed, hidden in self._block.run(self._state, self._propose):
            together = (packed.plan,) if alone else ()
            hidden = self._record_expert_loads(hidden)
            self.in_flight.append(self._sampled(packed, packed.key, together, begun_us, hidden))

    def _propose(self, packed: PackedInputs) -> None:
        """Drafts for the decodes of a step that is about to run."""
        if self._kinds.proposer is not None:
            self._kinds.proposer.propose(self._state, packed)
            self._sampler.force_drafts(packed.plan)

    def _drain(self) -> None:
        """Completes every step in the pipeline: page operations apply to all stages at once."""
        while self.busy:
            self.advance()
        if transfers := self._block.take_transfers():
            self._to_host(transfers)

    def _sampled(
        self,
        packed: PackedInputs,
        key: ProgramKey,
        together: tuple[StepPlan, ...],
        begun_us: int | None,
        hidden: Hidden,
    ) -> DeviceStep:
        arrays = self._sampler.sample(packed, key, hidden, self.in_flight)
        for array in jax.tree.leaves(arrays.to_host):
            array.copy_to_host_async()
        return DeviceStep(
            packed.step_id,
            self.num_dispatches,
            begun_us,
            packed.plan,
            key,
            together,
            packed.sampled,
            hidden.sampled,
            arrays,
        )

    def _record_expert_loads(self, hidden: Hidden) -> Hidden:
        """Keeps the tokens of experts until a step is read; returns what later programs take."""
        if self.counters.expert_loads is not None:
            for load in hidden.loads:
                load.copy_to_host_async()
            self._unread_loads.append((self.num_dispatches, hidden.loads))
        return hidden._replace(loads=())

    def read(self, step: DeviceStep) -> StepResults:
        """Wait for a step and bring its results to the host."""
        late = step.is_ready
        step.hidden.block_until_ready()
        while self._unread_loads and self._unread_loads[0][0] <= step.number:
            _, loads = self._unread_loads.popleft()
            self.counters.expert_loads.add(np.concatenate([np.asarray(load) for load in loads]))
        num_drafts = [0] * len(step.sampled)
        if step.arrays.acceptance is not None:
            num_drafts = np.asarray(step.arrays.acceptance.num_drafts).tolist()[: len(step.sampled)]
        return StepResults(
            sampled=step.sampled,
            token_ids=step.tokens(),
            num_drafts=num_drafts,
            width=step.width,
            logprobs=step.sampled_logprobs(),
            prompt_logprobs=jax.tree.map(np.asarray, step.arrays.prompt_logprobs),
            last_hidden=np.asarray(step.hidden) if step.pools else None,
            chunk_sums=jax.tree.map(np.asarray, step.arrays.chunk_sums),
            late=late,
        )

    def set_adapter(self, slot: int, layers: Iterable[Any]) -> None:
        """Put the layers of a LoRA adapter, arrays on the devices, into a slot from 1 on. Steps
        dispatched before still have the adapter that was there."""
        self._drain()
        self._kinds.set_adapter(self._state, slot, layers)

    def set_last_tokens(self, token_ids: SequenceOf[int]) -> None:
        """Make these the newest tokens of all slots, for steps that are only measured."""
        shape = self.shapes.abstract_state.last_tokens
        tokens = np.array([*token_ids, 0], shape.dtype)  # The last slot is for padding.
        self._state.last_tokens = jax.device_put(tokens, shape.sharding)

    def gather(self, pages: SequenceOf[int]) -> jax.Array:
        """A staging array [at least pages, elements] with up to TRANSFER_PAGES pages."""
        self._drain()
        return self._kinds.gather(self._state.kv, pages)

    def to_host(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Copy pages of sequences longer than the pool, given as (device, host); waits for the
        device. Where steps share reads, each layer's are copied as the next step gets to it."""
        if self.shapes.config.steps_per_weight_read > 1:
            self._block.add_transfers(pairs)
        else:
            self._to_host(pairs)

    def _to_host(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        host_kv = self._kinds.host_kv
        assert host_kv is not None
        host_kv.to_host(self._state, pairs)

    def scatter(self, pages: SequenceOf[int], staging: jax.Array) -> None:
        """Write the first rows of a staging array to pages."""
        self._drain()
        self._state.kv = self._kinds.scatter(self._state.kv, pages, staging)

    def read_pages(self, pages: SequenceOf[int]) -> np.ndarray:
        """Copy up to TRANSFER_PAGES pages to the host, uint8 [pages, bytes], layer by layer; waits
        for the device."""
        return self.page_bytes(self._gathered(pages), len(pages))

    def take_pages(self, pages: SequenceOf[int]) -> list[jax.Array]:
        """Copies of up to TRANSFER_PAGES pages on the devices, an array for each layer, for
        `page_bytes`, as of the steps dispatched so far. Does not wait for the device: a layer is
        copied once the last program that writes to it has run."""
        staged = [*self._gathered(pages)]
        for layer in staged:
            layer.copy_to_host_async()
        return staged

    def page_bytes(self, layers: Iterable[jax.Array], count: int) -> np.ndarray:
        """The first `count` pages of `take_pages`, uint8 [pages, bytes]. Waits for one layer after
        another; any thread may call it."""
        copied = [np.asarray(layer)[:count] for layer in layers]
        parts = np.concatenate([self._by_device(layer) for layer in copied], axis=2)
        return np.ascontiguousarray(parts).view(np.uint8).reshape(count, -1)

    def _gathered(self, pages: SequenceOf[int]) -> Iterator[jax.Array]:
        self._drain()
        for layer, first in zip(self._state.kv, self.shapes.kv.alike):
            yield self._kinds.gather([layer], pages, first)

    def write_pages(self, pages: SequenceOf[int], layers: SequenceOf[np.ndarray]) -> None:
        """Write up to TRANSFER_PAGES pages, given as an array [TRANSFER_PAGES, elements] for each
        layer, of which the first rows are used."""
        self._drain()
        kv, shapes = self._state.kv, self.shapes.kv
        for index, (first, layer) in enumerate(zip(shapes.alike, layers, strict=True)):
            staged = put(layer, shapes.staging(TRANSFER_PAGES, 1, first).sharding)
            own = kv[index : index + 1]
            kv[index : index + 1] = self._kinds.scatter(own, pages, staged, first)

    def _by_device(self, payload: np.ndarray) -> np.ndarray:
        """Pages [pages, elements] as [pages, devices, elements of each]."""
        return payload.reshape(len(payload), self.shapes.config.num_devices, -1)

    def copy(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Copy pages, given as (source, target); every source is read before a later pair
        overwrites it."""
        self._drain()
        self._kinds.copy(self._state, pairs)

    def poison(self, pages: SequenceOf[int]) -> None:
        """Fill pages, or their scales, with NaN, to expose reads before writes."""
        for first in range(0, len(pages), TRANSFER_SIZES[-1]):
            some = pages[first : first + TRANSFER_SIZES[-1]]
            shape = self.shapes.kv.staging(holding(TRANSFER_SIZES, len(some)))
            in_bytes = shape.dtype == np.uint8
            self.scatter(some, filled(shape, 0xFF if in_bytes else np.nan))

    def _forward(self, key: ProgramKey) -> Hidden:
        """Hidden states of the oldest step in the pipeline."""
        steps = [packed.frozen for packed in reversed(self._pipeline.steps)]
        self._kinds.set_tables(self._state, steps)
        return self._kinds.forward(self._state, key, steps)
