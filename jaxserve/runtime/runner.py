"""Runs plans on the device: packs, calls executables, and reads results.

Only reads wait for the device, and steps with grammars: between forward and sampling they wait for
the previous tokens. Programs are dispatched one after another, each reusing the donated buffers of
the previous one, so the device runs the steps in plan order.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

import jax
import numpy as np

from jaxserve.core.buckets import ProgramKey
from jaxserve.core.sequence import Sequence
from jaxserve.core.step_plan import ScheduledChunk, StepPlan
from jaxserve.kv.transfers import MOVE_PAGES, MOVE_SIZES
from jaxserve.models.family import Params
from jaxserve.runtime.in_flight import (
    BUBBLE,
    DispatchedStep,
    PackedStep,
    SamplingRow,
    StepResults,
)
from jaxserve.runtime.programs import specs
from jaxserve.runtime.programs.executables import Programs
from jaxserve.runtime.programs.program_shapes import ProgramShapes
from jaxserve.runtime.programs.step_layout import FrozenPlan
from jaxserve.sampling import (
    NO_TOKEN,
    SampleOutput,
    TokenLogprobs,
    needs_state,
    pack_admission,
    pack_rows,
    row_constants,
)
from jaxserve.structured.matcher import Matcher, advance


class Runner:
    """Owns the devices' state: parameters, KV pages, page tables, last tokens, sampling state.

    With pipeline stages, a step takes as many dispatches as there are stages: one stage works on it
    at a time, and each stage on a different step.
    """

    def __init__(self, shapes: ProgramShapes, params: Params, programs: Programs) -> None:
        self.shapes = shapes
        self._programs = programs
        self._params = params
        self._outside_layers = specs.outside_layers(params)
        self._kv = _zeros(shapes.abstract_kv)
        self._carry = _zeros(shapes.abstract_carry) if shapes.stages > 1 else None
        self._tables = _zeros(shapes.abstract_tables)
        self._last_tokens = _zeros(shapes.abstract_last_tokens)
        self._state = _zeros(shapes.abstract_state)
        self._no_masks = {rows: _zeros(shapes.masks(rows)) for rows in shapes.sample_rows}
        self._rows: dict[int, SamplingRow] = {}
        self._stages = collections.deque([BUBBLE] * (shapes.stages - 1))
        self.num_dispatches = 0
        self.in_flight: collections.deque[DispatchedStep] = collections.deque()
        jax.block_until_ready((self._kv, self._carry, self._last_tokens, self._state))

    @property
    def busy(self) -> bool:
        """Whether a dispatched step is still in the pipeline."""
        return any(packed is not BUBBLE for packed in self._stages)

    def register(
        self,
        seq: Sequence,
        seed: int,
        bad_word_ids: SequenceOf[SequenceOf[int]],
        eos_token_ids: tuple[int, ...],
        matcher: Matcher | None,
    ) -> None:
        """Register a sequence before its first step. `matcher` is its grammar state.

        Raises RequestError when its bad words have too many or too long token sequences.
        """
        words = tuple(tuple(word) for word in bad_word_ids)
        params, stateful = seq.params, needs_state(seq.params)
        row = SamplingRow(
            constants=row_constants(
                params, seed, multi_token_bad_words=any(len(word) > 1 for word in words)
            ),
            plain=params.greedy and not stateful and params.logprobs is None and matcher is None,
            stateful=stateful,
            matcher=matcher,
            bad_word_ids=words,
            eos_token_ids=() if params.ignore_eos else eos_token_ids,
        )
        if stateful:
            self._admission(seq, row)  # validates early
        self._rows[seq.seq_id] = row

    def forget(self, seq: Sequence) -> None:
        self._rows.pop(seq.seq_id, None)

    def pack(self, plan: StepPlan, step_id: int) -> PackedStep:
        """Fixes a plan's uploads. Raises ProgramMissError when no program holds it."""
        sampled = (*plan.decodes, *(chunk for chunk in plan.prefills if chunk.samples))
        rows = tuple(self._rows[chunk.seq.seq_id] for chunk in sampled)
        frozen = FrozenPlan.of(plan, self.shapes.config.page_size)
        return PackedStep(step_id, plan, self._key(plan), frozen, sampled, rows)

    def dispatch(self, packed: PackedStep, begun_us: int | None) -> None:
        """Calls a step's programs; returns before the devices are done.

        In a pipeline the step enters the first stage, all others advance by one, and the oldest is
        completed and joins `in_flight`.
        """
        self.num_dispatches += 1
        self._stages.append(packed)
        key, together = self._key(), tuple(step.plan for step in self._stages)
        hidden, prefill_hidden = self._forward(key)
        oldest = self._stages.popleft()
        if oldest is not BUBBLE:
            self.in_flight.append(
                self._sampled(oldest, key, together, begun_us, hidden, prefill_hidden)
            )

    def advance(self, begun_us: int | None = None) -> None:
        """Moves the pipeline on by one stage, with no step entering."""
        self.dispatch(BUBBLE, begun_us)

    def _drain(self) -> None:
        """Completes every step in the pipeline: page operations apply to all stages at once."""
        while self.busy:
            self.advance()

    def _sampled(
        self,
        packed: PackedStep,
        key: ProgramKey,
        together: tuple[StepPlan, ...],
        begun_us: int | None,
        hidden: jax.Array,
        prefill_hidden: jax.Array,
    ) -> DispatchedStep:
        token_ids = logprobs = None
        if packed.sampled:
            token_ids, logprobs = self._sample(packed, hidden)
        prompt_logprobs = self._score_prompts(packed, prefill_hidden)
        for array in jax.tree.leaves((token_ids, logprobs, prompt_logprobs)):
            array.copy_to_host_async()
        return DispatchedStep(
            packed.step_id,
            self.num_dispatches,
            begun_us,
            packed.plan,
            key,
            together,
            packed.sampled,
            hidden,
            token_ids,
            logprobs,
            prompt_logprobs,
        )

    def read(self, step: DispatchedStep) -> StepResults:
        """Wait for a step and bring its results to the host."""
        step.hidden.block_until_ready()
        token_ids = [] if step.token_ids is None else np.asarray(step.token_ids).tolist()
        return StepResults(
            sampled=step.sampled,
            token_ids=token_ids[: len(step.sampled)],
            logprobs=jax.tree.map(np.asarray, step.logprobs),
            prompt_logprobs=jax.tree.map(np.asarray, step.prompt_logprobs),
        )

    def gather(self, pages: SequenceOf[int]) -> jax.Array:
        """A staging array [at least pages, elements] with up to MOVE_PAGES pages."""
        self._drain()
        size = _holding(MOVE_SIZES, len(pages))
        program = self._programs[specs.page_name("gather", size)].call
        return program(self._kv, _padded(pages, size))

    def scatter(self, pages: SequenceOf[int], staging: jax.Array) -> None:
        """Write the first rows of a staging array to pages."""
        self._drain()
        size = staging.shape[0]
        program = self._programs[specs.page_name("scatter", size)].call
        self._kv = program(self._kv, _padded(pages, size), staging)

    def read_pages(self, pages: SequenceOf[int]) -> np.ndarray:
        """Copy up to MOVE_PAGES pages to the host, uint8 [pages, bytes], layer by layer; waits for
        the device."""
        self._drain()
        program = self._programs[specs.page_name("gather-layer", MOVE_PAGES)].call
        padded = _padded(pages, MOVE_PAGES)
        layers = [np.asarray(program([layer], padded))[: len(pages)] for layer in self._kv]
        parts = np.stack([self._by_device(layer) for layer in layers], axis=2)
        return np.ascontiguousarray(parts).view(np.uint8).reshape(len(pages), -1)

    def write_pages(self, pages: SequenceOf[int], images: np.ndarray) -> None:
        """Write up to MOVE_PAGES pages, given as `read_pages` returns them."""
        self._drain()
        program = self._programs[specs.page_name("scatter-layer", MOVE_PAGES)].call
        padded, place = _padded(pages, MOVE_PAGES), self.shapes.staging(MOVE_PAGES, 1)
        parts = self._by_device(images.view(place.dtype))
        parts = parts.reshape(*parts.shape[:2], len(self._kv), -1)
        for index in range(len(self._kv)):
            staging = np.zeros(place.shape, place.dtype)
            staging[: len(pages)] = parts[:, :, index].reshape(len(pages), -1)
            staged = jax.device_put(staging, place.sharding)
            self._kv[index : index + 1] = program(self._kv[index : index + 1], padded, staged)

    def _by_device(self, images: np.ndarray) -> np.ndarray:
        """Pages [pages, elements] as [pages, devices, elements of each]."""
        return images.reshape(len(images), self.shapes.config.num_devices, -1)

    def copy(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Copy pages, given as (source, target); every source is read before a later pair
        overwrites it."""
        self._drain()
        program, most = self._programs[specs.COPY].call, specs.COPY_PAGES
        for first in range(0, len(pairs), most):
            sources, targets = zip(*pairs[first : first + most])
            self._kv = program(self._kv, _padded(sources, most), _padded(targets, most))

    def poison(self, pages: SequenceOf[int]) -> None:
        """Fill pages with NaN, to expose reads before writes."""
        for first in range(0, len(pages), MOVE_SIZES[-1]):
            some = pages[first : first + MOVE_SIZES[-1]]
            shape = self.shapes.staging(_holding(MOVE_SIZES, len(some)))
            self.scatter(some, _filled(shape, np.nan))

    def _key(self, *entering: StepPlan) -> ProgramKey:
        """The program that holds all steps in the pipeline, and those `entering`."""
        plans = (*entering, *(packed.plan for packed in self._stages))
        return self.shapes.buckets.program(plan.shape for plan in plans)

    def _forward(self, key: ProgramKey) -> tuple[jax.Array, jax.Array]:
        """Hidden states of the oldest step in the pipeline: sampled ones, and of prefill tokens."""
        layout = self.shapes.layouts[key]
        self._set_tables()
        metadata = [layout.pack(packed.frozen) for packed in reversed(self._stages)]
        if self.shapes.stages > 1:
            program = self._programs[specs.part_name("pipeline-step", key)].call
            self._kv, self._tables, self._carry, *hidden = program(
                self._params,
                self._kv,
                self._tables,
                self._carry,
                self._last_tokens,
                np.stack(metadata),
            )
            return hidden
        if self.shapes.config.program_scope == "layer":
            return self._forward_by_layer(key, *metadata)
        program = self._programs[specs.part_name("forward", key)].call
        self._kv, self._tables, *hidden = program(
            self._params, self._kv, self._tables, self._last_tokens, *metadata
        )
        return hidden

    def _set_tables(self) -> None:
        """Write the whole page tables of a step, those with too many changes for its metadata, on
        the stage that it enters now."""
        stages, width = self.shapes.stages, self.shapes.max_pages
        by_stage = (packed.frozen.tables for packed in reversed(self._stages))
        for tables in itertools.zip_longest(*by_stage):
            slots = np.full(stages, self.shapes.trash_slot, np.int32)
            rows = np.zeros((stages, width), np.int32)
            for stage, table in enumerate(tables):
                if table is not None:
                    slots[stage], pages = table
                    rows[stage, : len(pages)] = pages
            self._tables = self._programs[specs.SET_TABLES].call(self._tables, slots, rows)

    def _forward_by_layer(
        self, key: ProgramKey, metadata: np.ndarray
    ) -> tuple[jax.Array, jax.Array]:
        kinds, params = self.shapes.model.layer_kinds, self._params["layers"]
        embed = self._programs[specs.part_name("embed", key)].call
        final_norm = self._programs[specs.part_name("final-norm", key)].call
        self._tables, x, shared, slot_mapping, sampled = embed(
            self._outside_layers, self._tables, self._last_tokens, metadata
        )
        for group in self.shapes.groups(key):
            layers = self._programs[specs.layers_name(key, kinds[group])].call
            self._kv[group], x = layers(params[group], self._kv[group], x, shared, slot_mapping)
        return final_norm(self._outside_layers, x, sampled)

    def _sample(
        self, packed: PackedStep, hidden: jax.Array
    ) -> tuple[jax.Array, TokenLogprobs | None]:
        sampled, rows = packed.sampled, packed.rows
        bucket = _holding(self.shapes.sample_rows, len(sampled))
        if all(row.plain for row in rows):
            slots = np.full(bucket, self.shapes.trash_slot, np.int32)
            slots[: len(sampled)] = [chunk.slot for chunk in sampled]
            program = self._programs[specs.sample_name("greedy", bucket)].call
            self._last_tokens, token_ids = program(
                self._outside_layers, self._last_tokens, hidden, slots
            )
            return token_ids, None
        for chunk, row in zip(sampled, rows):
            if row.stateful and chunk in packed.plan.prefills:
                self._admit(chunk, row)
        meta = pack_rows(
            [row.constants for row in rows],
            [chunk.slot for chunk in sampled],
            [chunk.output_index for chunk in sampled],
            bucket,
            self.shapes.trash_slot,
        )
        program = self._programs[specs.sample_name("general", bucket)].call
        output: SampleOutput
        self._last_tokens, self._state, output = program(
            self._outside_layers,
            self._last_tokens,
            self._state,
            hidden,
            meta,
            self._masks(packed, bucket),
        )
        wanted = any(chunk.seq.params.logprobs is not None for chunk in sampled)
        return output.token_ids, output.logprobs if wanted else None

    def _masks(self, packed: PackedStep, bucket: int) -> np.ndarray | jax.Array:
        """Grammar masks of the rows. A matcher needs all previous tokens of its row, so the host
        waits for those while the devices run the forward pass."""
        nothing = self._no_masks[bucket]
        matched = [
            (place, row.matcher, chunk)
            for place, (row, chunk) in enumerate(zip(packed.rows, packed.sampled))
            if row.matcher is not None
        ]
        if not matched:
            return nothing
        if any(matcher.num_tokens < chunk.output_index for _, matcher, chunk in matched):
            for step in self.in_flight:
                advance(self._matched_tokens(step))
        masks = np.zeros(nothing.shape, np.int32)
        for place, matcher, _ in matched:
            masks[place] = matcher.mask
        return masks

    def _matched_tokens(self, step: DispatchedStep) -> Iterator[tuple[Matcher, int, int]]:
        """Tokens that a step sampled for sequences with a matcher, as input to `advance`."""
        if step.token_ids is None:
            return
        for chunk, token_id in zip(step.sampled, np.asarray(step.token_ids).tolist()):
            row = self._rows.get(chunk.seq.seq_id)
            if row is not None and row.matcher is not None and token_id != NO_TOKEN:
                yield row.matcher, chunk.output_index, token_id

    def _score_prompts(self, packed: PackedStep, hidden: jax.Array) -> TokenLogprobs | None:
        """Log probabilities of the token after each prefill token, if a request asks for them."""
        prefills = packed.plan.prefills
        if all(chunk.seq.params.prompt_logprobs is None for chunk in prefills):
            return None
        tokens, start = hidden.shape[1], 0
        targets = np.zeros(tokens, np.int32)
        for chunk in prefills:
            first = chunk.start + 1
            following = chunk.seq.prompt_token_ids[first : first + chunk.num_tokens]
            targets[start : start + len(following)] = following
            start += chunk.num_tokens
        program = self._programs[specs.prompt_logprobs_name(tokens)].call
        return program(self._outside_layers, hidden, targets)

    def _admit(self, chunk: ScheduledChunk, row: SamplingRow) -> None:
        """Fill the sequence's row of sampling state, which another sequence may have used."""
        program = self._programs[specs.ADMIT].call
        self._state = program(self._state, np.int32(chunk.slot), self._admission(chunk.seq, row))

    def _admission(self, seq: Sequence, row: SamplingRow) -> np.ndarray:
        return pack_admission(
            seq.params,
            self.shapes.model.vocab_size,
            seq.prompt_token_ids,
            seq.output_token_ids,
            eos_token_ids=row.eos_token_ids,
            bad_word_ids=row.bad_word_ids,
            ranks=self.shapes.vocab_ranks,
        )


def _holding(sizes: SequenceOf[int], count: int) -> int:
    """The smallest of ascending `sizes` that holds `count`."""
    return next(size for size in sizes if size >= count)


def _padded(pages: SequenceOf[int], size: int) -> np.ndarray:
    """Page ids int32 [size], padded with -1, which programs skip."""
    padded = np.full(size, -1, np.int32)
    padded[: len(pages)] = pages
    return padded


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda shape: _filled(shape, 0), shapes)


def _filled(array: jax.ShapeDtypeStruct, value: float) -> jax.Array:
    """A constant array with the given sharding, filled on the host: filling by XLA would compile a
    program for every shape."""

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        sizes = (part.indices(size) for part, size in zip(index, array.shape))
        return np.full([stop - start for start, stop, _ in sizes], value, array.dtype)

    return jax.make_array_from_callback(array.shape, array.sharding, shard)
