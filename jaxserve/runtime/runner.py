"""Runs plans on the device: packs, calls executables, and reads results when asked.

Nothing here waits for the device but `read`. A step's programs are dispatched one after another,
each taking over the buffers of the one before, so the device sees the steps in plan order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as SequenceOf
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.engine.plan import Chunk, StepPlan
from jaxserve.engine.sequence import Sequence
from jaxserve.kv.transfers import MOVE_SIZES
from jaxserve.models.family import Params
from jaxserve.runtime import specs
from jaxserve.runtime.buckets import ProgramKey
from jaxserve.runtime.programs import Programs
from jaxserve.runtime.specs import Geometry
from jaxserve.sampling import (
    SampleOutput,
    TokenLogprobs,
    init_state,
    needs_state,
    pack_admission,
    pack_rows,
    row_constants,
)


@dataclasses.dataclass(frozen=True)
class SamplingRow:
    """What the runner keeps of a sequence's sampling, from registration to its end."""

    constants: np.ndarray
    plain: bool
    """Whether the most likely token is all it wants, so that the greedy program will do."""
    stateful: bool
    bad_word_ids: tuple[tuple[int, ...], ...]
    eos_token_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class PackedStep:
    """A plan made ready: its uploads are fixed, and its pages no longer read."""

    plan: StepPlan
    key: ProgramKey
    metadata: np.ndarray
    sampled: tuple[Chunk, ...]


@dataclasses.dataclass(frozen=True)
class DispatchedStep:
    """A step on its way: arrays that the device has yet to fill."""

    plan: StepPlan
    key: ProgramKey
    sampled: tuple[Chunk, ...]
    token_ids: jax.Array | None
    logprobs: TokenLogprobs | None
    prompt_logprobs: TokenLogprobs | None


@dataclasses.dataclass(frozen=True)
class StepResults:
    """What the host reads of a step: `token_ids[i]` was sampled by `sampled[i]`.

    `logprobs` has the same rows; `prompt_logprobs` one row for each of the step's prefill tokens.
    Both are numpy, and None when nobody asked.
    """

    sampled: tuple[Chunk, ...]
    token_ids: list[int]
    logprobs: TokenLogprobs | None
    prompt_logprobs: TokenLogprobs | None


class Runner:
    """Owns the device's state: parameters, KV pages, last tokens, sampling state."""

    def __init__(self, geometry: Geometry, params: Params, programs: Programs) -> None:
        self.geometry = geometry
        self._programs = programs
        self._params = params
        self._outside_layers = specs.outside_layers(params)
        self._kv = _zeros(geometry.abstract_kv)
        self._last_tokens = jnp.zeros(geometry.trash_slot + 1, jnp.int32)
        self._state = init_state(geometry.trash_slot, geometry.model.vocab_size)
        self._rows: dict[int, SamplingRow] = {}
        jax.block_until_ready((self._kv, self._last_tokens, self._state))

    def register(
        self,
        seq: Sequence,
        seed: int,
        bad_word_ids: SequenceOf[SequenceOf[int]],
        eos_token_ids: tuple[int, ...],
    ) -> None:
        """Make a sequence known before its first step.

        Raises RequestError when its bad words have too many or too long token sequences.
        """
        words = tuple(tuple(word) for word in bad_word_ids)
        params, stateful = seq.params, needs_state(seq.params)
        row = SamplingRow(
            constants=row_constants(
                params, seed, multi_token_bad_words=any(len(word) > 1 for word in words)
            ),
            plain=params.greedy and not stateful and params.logprobs is None,
            stateful=stateful,
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
        key = self.geometry.buckets.pick(len(plan.decodes), plan.num_prefill_tokens)
        sampled = (*plan.decodes, *(chunk for chunk in plan.prefills if chunk.samples))
        return PackedStep(plan, key, self.geometry.layouts[key].pack(plan), sampled)

    def dispatch(self, packed: PackedStep) -> DispatchedStep:
        """Call the step's programs; returns before the device is done."""
        if self.geometry.config.program_scope == "layer":
            hidden, prefill_hidden = self._forward_by_layer(packed)
        else:
            hidden, prefill_hidden = self._forward(packed)
        token_ids = logprobs = None
        if packed.sampled:
            token_ids, logprobs = self._sample(packed, hidden)
        prompt_logprobs = self._score_prompts(packed, prefill_hidden)
        for array in jax.tree.leaves((token_ids, logprobs, prompt_logprobs)):
            array.copy_to_host_async()
        return DispatchedStep(
            packed.plan, packed.key, packed.sampled, token_ids, logprobs, prompt_logprobs
        )

    def read(self, step: DispatchedStep) -> StepResults:
        """Wait for a step and bring its results to the host."""
        token_ids = [] if step.token_ids is None else np.asarray(step.token_ids).tolist()
        return StepResults(
            sampled=step.sampled,
            token_ids=token_ids[: len(step.sampled)],
            logprobs=jax.tree.map(np.asarray, step.logprobs),
            prompt_logprobs=jax.tree.map(np.asarray, step.prompt_logprobs),
        )

    def gather(self, pages: SequenceOf[int]) -> jax.Array:
        """Images [at least pages, elements] of up to MOVE_PAGES pages, in a staging array."""
        size = _holding(MOVE_SIZES, len(pages))
        program = self._programs[specs.page_name("gather", size)].call
        return program(self._kv, _padded(pages, size))

    def scatter(self, pages: SequenceOf[int], staging: jax.Array) -> None:
        """Write the first images of a staging array to pages."""
        size = staging.shape[0]
        program = self._programs[specs.page_name("scatter", size)].call
        self._kv = program(self._kv, _padded(pages, size), staging)

    def copy(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Copy pages, given as (source, target); every source is read before its turn as target
        of a later pair."""
        program, most = self._programs[specs.COPY].call, specs.COPY_PAGES
        for first in range(0, len(pairs), most):
            sources, targets = zip(*pairs[first : first + most])
            self._kv = program(self._kv, _padded(sources, most), _padded(targets, most))

    def poison(self, pages: SequenceOf[int]) -> None:
        """Fill pages with NaN, so that whoever reads them before they are written is found out."""
        most = MOVE_SIZES[-1]
        elements = self.geometry.pages.page_bytes // self.geometry.dtype.itemsize
        images = np.full((most, elements * self.geometry.model.num_layers), np.nan)
        for first in range(0, len(pages), most):
            staging = jax.device_put(images.astype(self.geometry.dtype))
            self.scatter(pages[first : first + most], staging)

    def _forward(self, packed: PackedStep) -> tuple[jax.Array, jax.Array]:
        program = self._programs[specs.part_name("forward", packed.key)].call
        self._kv, *hidden = program(self._params, self._kv, self._last_tokens, packed.metadata)
        return hidden

    def _forward_by_layer(self, packed: PackedStep) -> tuple[jax.Array, jax.Array]:
        key, kinds, params = packed.key, self.geometry.model.layer_kinds, self._params["layers"]
        begin = self._programs[specs.part_name("begin", key)].call
        finish = self._programs[specs.part_name("finish", key)].call
        x, shared, addresses, sampled = begin(
            self._outside_layers, self._last_tokens, packed.metadata
        )
        for group in self.geometry.groups(key):
            layers = self._programs[specs.layers_name(key, kinds[group])].call
            self._kv[group], x = layers(params[group], self._kv[group], x, shared, addresses)
        return finish(self._outside_layers, x, sampled)

    def _sample(
        self, packed: PackedStep, hidden: jax.Array
    ) -> tuple[jax.Array, TokenLogprobs | None]:
        sampled, bucket = packed.sampled, hidden.shape[1]
        rows = [self._row(chunk) for chunk in sampled]
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
            self._outside_layers, self._last_tokens, self._state, hidden, meta
        )
        wanted = any(chunk.seq.params.logprobs is not None for chunk in sampled)
        return output.token_ids, output.logprobs if wanted else None

    def _score_prompts(self, packed: PackedStep, hidden: jax.Array) -> TokenLogprobs | None:
        """Scores of the tokens that follow each prefill token, when a request asks for them."""
        prefills = packed.plan.prefills
        if all(chunk.seq.params.prompt_logprobs is None for chunk in prefills):
            return None
        targets, start = np.zeros(packed.key.prefill_tokens, np.int32), 0
        for chunk in prefills:
            first = chunk.start + 1
            following = chunk.seq.prompt_token_ids[first : first + chunk.num_tokens]
            targets[start : start + len(following)] = following
            start += chunk.num_tokens
        program = self._programs[specs.prompt_logprobs_name(packed.key.prefill_tokens)].call
        return program(self._outside_layers, hidden, targets)

    def _row(self, chunk: Chunk) -> SamplingRow:
        return self._rows[chunk.seq.seq_id]

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
    """Zeroed arrays on the device. From the host, since filling by XLA would compile a program
    for every shape."""
    return jax.tree.map(lambda array: jax.device_put(np.zeros(array.shape, array.dtype)), shapes)
