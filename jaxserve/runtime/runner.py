"""Runs plans on the device: packs, calls executables, and reads results when asked.

Nothing here waits for the device but `read`, and a step whose rows have grammars: between its
forward and its sampling it waits for the tokens before. Programs are dispatched one after another,
each taking over the buffers of the one before, so the device sees the steps in plan order.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

import jax
import numpy as np

from jaxserve.engine.plan import Chunk, StepPlan
from jaxserve.engine.sequence import Sequence
from jaxserve.kv.transfers import MOVE_PAGES, MOVE_SIZES
from jaxserve.models.family import Params
from jaxserve.runtime import specs
from jaxserve.runtime.batch import Snapshot
from jaxserve.runtime.buckets import ProgramKey
from jaxserve.runtime.geometry import Geometry
from jaxserve.runtime.programs import Programs
from jaxserve.runtime.under_way import (
    NOTHING,
    DispatchedStep,
    PackedStep,
    SamplingRow,
    StepResults,
)
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

    With pipeline stages, a step is under way for as many dispatches as there are stages: one stage
    works on it at a time, and each on another step.
    """

    def __init__(self, geometry: Geometry, params: Params, programs: Programs) -> None:
        self.geometry = geometry
        self._programs = programs
        self._params = params
        self._outside_layers = specs.outside_layers(params)
        self._kv = _zeros(geometry.abstract_kv)
        self._carry = _zeros(geometry.abstract_carry) if geometry.stages > 1 else None
        self._tables = _zeros(geometry.abstract_tables)
        self._last_tokens = _zeros(geometry.abstract_last_tokens)
        self._state = _zeros(geometry.abstract_state)
        self._no_masks = {rows: _zeros(geometry.masks(rows)) for rows in geometry.sample_rows}
        self._rows: dict[int, SamplingRow] = {}
        self._under_way = collections.deque([NOTHING] * (geometry.stages - 1))
        self.num_dispatches = 0
        self.done: collections.deque[DispatchedStep] = collections.deque()
        jax.block_until_ready((self._kv, self._carry, self._last_tokens, self._state))

    @property
    def busy(self) -> bool:
        """Whether a step that was dispatched is still under way, and not done."""
        return any(packed is not NOTHING for packed in self._under_way)

    def register(
        self,
        seq: Sequence,
        seed: int,
        bad_word_ids: SequenceOf[SequenceOf[int]],
        eos_token_ids: tuple[int, ...],
        matcher: Matcher | None,
    ) -> None:
        """Make a sequence known before its first step. `matcher` is where its output stands.

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
            self._admission(seq, row)  # raises now what would be wrong later
        self._rows[seq.seq_id] = row

    def forget(self, seq: Sequence) -> None:
        self._rows.pop(seq.seq_id, None)

    def pack(self, plan: StepPlan) -> PackedStep:
        """Fix a plan's uploads. Raises ProgramMissError when no program holds it.

        Decodes go longest context first: attention takes neighbours as far as the longest of them.
        """
        decodes = sorted(plan.decodes, key=lambda chunk: chunk.start, reverse=True)
        plan = dataclasses.replace(plan, decodes=tuple(decodes))
        sampled = (*plan.decodes, *(chunk for chunk in plan.prefills if chunk.samples))
        rows = tuple(self._rows[chunk.seq.seq_id] for chunk in sampled)
        snapshot = Snapshot.of(plan, self.geometry.config.page_size)
        return PackedStep(plan, self._key(plan), snapshot, sampled, rows)

    def dispatch(self, packed: PackedStep) -> None:
        """Call a step's programs; returns before the devices are done.

        In a pipeline the step enters the first stage, all others go on by one, and the oldest is
        done. `done` has those whose results can be read.
        """
        self.num_dispatches += 1
        self._under_way.append(packed)
        key, together = self._key(), tuple(step.plan for step in self._under_way)
        hidden, prefill_hidden = self._forward(key)
        oldest = self._under_way.popleft()
        if oldest is not NOTHING:
            self.done.append(self._sampled(oldest, key, together, hidden, prefill_hidden))

    def advance(self) -> None:
        """Let the steps under way go on by a stage, with none to follow."""
        self.dispatch(NOTHING)

    def _drain(self) -> None:
        """Let every step under way run to its end: pages are moved for all stages at once."""
        while self.busy:
            self.advance()

    def _sampled(
        self,
        packed: PackedStep,
        key: ProgramKey,
        together: tuple[StepPlan, ...],
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
            packed.plan,
            key,
            together,
            packed.sampled,
            hidden,
            token_ids,
            logprobs,
            prompt_logprobs,
            self.num_dispatches,
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
        """Images [at least pages, elements] of up to MOVE_PAGES pages, in a staging array."""
        self._drain()
        size = _holding(MOVE_SIZES, len(pages))
        program = self._programs[specs.page_name("gather", size)].call
        return program(self._kv, _padded(pages, size))

    def scatter(self, pages: SequenceOf[int], staging: jax.Array) -> None:
        """Write the first images of a staging array to pages."""
        self._drain()
        size = staging.shape[0]
        program = self._programs[specs.page_name("scatter", size)].call
        self._kv = program(self._kv, _padded(pages, size), staging)

    def read_pages(self, pages: SequenceOf[int]) -> np.ndarray:
        """Images of up to MOVE_PAGES pages in the host's memory, uint8 [pages, bytes], layer by
        layer; waits for them."""
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
        padded, place = _padded(pages, MOVE_PAGES), self.geometry.staging(MOVE_PAGES, 1)
        parts = self._by_device(images.view(place.dtype))
        parts = parts.reshape(*parts.shape[:2], len(self._kv), -1)
        for index in range(len(self._kv)):
            staging = np.zeros(place.shape, place.dtype)
            staging[: len(pages)] = parts[:, :, index].reshape(len(pages), -1)
            staged = jax.device_put(staging, place.sharding)
            self._kv[index : index + 1] = program(self._kv[index : index + 1], padded, staged)

    def _by_device(self, images: np.ndarray) -> np.ndarray:
        """Images [pages, elements] as [pages, devices, elements of each]."""
        return images.reshape(len(images), self.geometry.config.num_devices, -1)

    def copy(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Copy pages, given as (source, target); every source is read before its turn as target
        of a later pair."""
        self._drain()
        program, most = self._programs[specs.COPY].call, specs.COPY_PAGES
        for first in range(0, len(pairs), most):
            sources, targets = zip(*pairs[first : first + most])
            self._kv = program(self._kv, _padded(sources, most), _padded(targets, most))

    def poison(self, pages: SequenceOf[int]) -> None:
        """Fill pages with NaN, so that whoever reads them before they are written is found out."""
        for first in range(0, len(pages), MOVE_SIZES[-1]):
            some = pages[first : first + MOVE_SIZES[-1]]
            shape = self.geometry.staging(_holding(MOVE_SIZES, len(some)))
            self.scatter(some, _filled(shape, np.nan))

    def _key(self, *entering: StepPlan) -> ProgramKey:
        """The program that holds all steps under way, and those `entering`."""
        plans = (*entering, *(packed.plan for packed in self._under_way))
        return self.geometry.buckets.program(plan.shape for plan in plans)

    def _forward(self, key: ProgramKey) -> tuple[jax.Array, jax.Array]:
        """Hidden states to sample from and of prefill tokens, of the oldest step under way."""
        layout = self.geometry.layouts[key]
        self._set_tables()
        metadata = [layout.pack(packed.snapshot) for packed in reversed(self._under_way)]
        if self.geometry.stages > 1:
            program = self._programs[specs.part_name("tick", key)].call
            self._kv, self._tables, self._carry, *hidden = program(
                self._params,
                self._kv,
                self._tables,
                self._carry,
                self._last_tokens,
                np.stack(metadata),
            )
            return hidden
        if self.geometry.config.program_scope == "layer":
            return self._forward_by_layer(key, *metadata)
        program = self._programs[specs.part_name("forward", key)].call
        self._kv, self._tables, *hidden = program(
            self._params, self._kv, self._tables, self._last_tokens, *metadata
        )
        return hidden

    def _set_tables(self) -> None:
        """Write the page tables of which a step changes too much to say so in its metadata, in the
        stage that it enters now."""
        stages, width = self.geometry.stages, self.geometry.max_pages
        by_stage = (packed.snapshot.tables for packed in reversed(self._under_way))
        for tables in itertools.zip_longest(*by_stage):
            slots = np.full(stages, self.geometry.trash_slot, np.int32)
            rows = np.zeros((stages, width), np.int32)
            for stage, table in enumerate(tables):
                if table is not None:
                    slots[stage], pages = table
                    rows[stage, : len(pages)] = pages
            self._tables = self._programs[specs.SET_TABLES].call(self._tables, slots, rows)

    def _forward_by_layer(
        self, key: ProgramKey, metadata: np.ndarray
    ) -> tuple[jax.Array, jax.Array]:
        kinds, params = self.geometry.model.layer_kinds, self._params["layers"]
        begin = self._programs[specs.part_name("begin", key)].call
        finish = self._programs[specs.part_name("finish", key)].call
        self._tables, x, shared, addresses, sampled = begin(
            self._outside_layers, self._tables, self._last_tokens, metadata
        )
        for group in self.geometry.groups(key):
            layers = self._programs[specs.layers_name(key, kinds[group])].call
            self._kv[group], x = layers(params[group], self._kv[group], x, shared, addresses)
        return finish(self._outside_layers, x, sampled)

    def _sample(
        self, packed: PackedStep, hidden: jax.Array
    ) -> tuple[jax.Array, TokenLogprobs | None]:
        sampled, rows = packed.sampled, packed.rows
        bucket = _holding(self.geometry.sample_rows, len(sampled))
        if all(row.plain for row in rows):
            slots = np.full(bucket, self.geometry.trash_slot, np.int32)
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
            self.geometry.trash_slot,
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
        """What each row may sample. A row with a matcher needs its tokens up to now for that, so
        the host waits for those while the devices compute what is to be sampled from."""
        nothing = self._no_masks[bucket]
        matched = [
            (place, row.matcher, chunk)
            for place, (row, chunk) in enumerate(zip(packed.rows, packed.sampled))
            if row.matcher is not None
        ]
        if not matched:
            return nothing
        if any(matcher.num_tokens < chunk.output_index for _, matcher, chunk in matched):
            for step in self.done:
                advance(self._matched_tokens(step))
        masks = np.zeros(nothing.shape, np.int32)
        for place, matcher, _ in matched:
            masks[place] = matcher.mask
        return masks

    def _matched_tokens(self, step: DispatchedStep) -> Iterator[tuple[Matcher, int, int]]:
        """What a step has sampled for sequences with a matcher, which has it yet to take in."""
        if step.token_ids is None:
            return
        for chunk, token_id in zip(step.sampled, np.asarray(step.token_ids).tolist()):
            row = self._rows.get(chunk.seq.seq_id)
            if row is not None and row.matcher is not None and token_id != NO_TOKEN:
                yield row.matcher, chunk.output_index, token_id

    def _score_prompts(self, packed: PackedStep, hidden: jax.Array) -> TokenLogprobs | None:
        """Scores of the tokens that follow each prefill token, when a request asks for them."""
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

    def _admit(self, chunk: Chunk, row: SamplingRow) -> None:
        """Fill the sequence's row of sampling state, which another sequence may have used."""
        program = self._programs[specs.ADMIT].call
        self._state = program(self._state, np.int32(chunk.slot), self._admission(chunk.seq, row))

    def _admission(self, seq: Sequence, row: SamplingRow) -> np.ndarray:
        return pack_admission(
            seq.params,
            self.geometry.model.vocab_size,
            seq.prompt_token_ids,
            seq.output_token_ids,
            eos_token_ids=row.eos_token_ids,
            bad_word_ids=row.bad_word_ids,
            ranks=self.geometry.vocab_ranks,
        )


def _holding(sizes: SequenceOf[int], count: int) -> int:
    """The smallest of ascending `sizes` that holds `count`."""
    return next(size for size in sizes if size >= count)


def _padded(pages: SequenceOf[int], size: int) -> np.ndarray:
    """Page numbers int32 [size]; those missing are of no page, and nothing is done for them."""
    padded = np.full(size, -1, np.int32)
    padded[: len(pages)] = pages
    return padded


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda shape: _filled(shape, 0), shapes)


def _filled(array: jax.ShapeDtypeStruct, value: float) -> jax.Array:
    """An array of one value where its shape says. From the host, since filling by XLA would compile
    a program for every shape."""

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        sizes = (part.indices(size) for part, size in zip(index, array.shape))
        return np.full([stop - start for start, stop, _ in sizes], value, array.dtype)

    return jax.make_array_from_callback(array.shape, array.sharding, shard)
