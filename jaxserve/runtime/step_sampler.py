"""What follows the forward pass of a step: its tokens, their verification and log probabilities."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import jax
import numpy as np

from jaxserve.core.sequence import Sequence
from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.core.steps.plan import ScheduledChunk, StepPlan
from jaxserve.core.steps.results import TokenLogprobs
from jaxserve.runtime.grammar_masks import GrammarMasks
from jaxserve.runtime.program_kinds import ProgramKinds
from jaxserve.runtime.programs.device_state import DeviceState
from jaxserve.runtime.programs.device_step import (
    DeviceStep,
    PackedInputs,
    SampledArrays,
    SamplingRow,
)
from jaxserve.runtime.programs.forward.forward_programs import Hidden
from jaxserve.runtime.programs.shapes.program import ProgramShapes
from jaxserve.sampling import needs_state, row_constants
from jaxserve.sampling.speculation import Acceptance
from jaxserve.structured.matcher import TokenMatcher


class StepSampler:
    """Runs the sampling programs of steps, with what it knows of each registered sequence."""

    def __init__(self, state: DeviceState, shapes: ProgramShapes, kinds: ProgramKinds) -> None:
        self._state, self._shapes, self._kinds = state, shapes, kinds
        self._rows: dict[int, SamplingRow] = {}
        self._masks = GrammarMasks(self._rows)

    def register(
        self,
        seq: Sequence,
        seed: int,
        bad_word_ids: SequenceOf[SequenceOf[int]],
        eos_token_ids: tuple[int, ...],
        matcher: TokenMatcher | None,
    ) -> None:
        """As Runner.register."""
        words = tuple(tuple(word) for word in bad_word_ids)
        params, stateful = seq.params, needs_state(seq.params)
        row = SamplingRow(
            constants=row_constants(
                params,
                seed,
                multi_token_bad_words=any(len(word) > 1 for word in words),
                processors=self._shapes.processors.names,
            ),
            plain=params.greedy
            and not stateful
            and params.logprobs is None
            and matcher is None
            and not params.extra_args,
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
        self._masks.forget(seq)

    def rows(self, sampled: Iterable[ScheduledChunk]) -> tuple[SamplingRow, ...]:
        """The sampling data of the sequences of these chunks."""
        return tuple(self._rows[chunk.seq.seq_id] for chunk in sampled)

    def force_drafts(self, plan: StepPlan) -> None:
        """Replaces the drafts of decodes by those that their grammars force."""
        if forced := self._masks.forced(plan):
            self._kinds.force_drafts(self._state, forced)

    def sample(
        self,
        packed: PackedInputs,
        key: ProgramKey,
        hidden: Hidden,
        in_flight: Iterable[DeviceStep],
    ) -> SampledArrays:
        """Samples after the forward pass of a step, by the program `key`, and dispatches what else
        follows it. `in_flight`: the steps before it that are not read, whose tokens the grammars'
        matchers wait for."""
        token_ids = acceptance = logprobs = None
        if any(chunk.seq.pooling is None for chunk in packed.sampled):
            token_ids, acceptance, logprobs = self._verified(
                packed, key.width, hidden.sampled, in_flight
            )
        if self._kinds.proposer is not None:
            self._kinds.proposer.extend(self._state, packed, key, hidden)
        prompt_logprobs = self._score_prompts(packed, key, hidden.of_prefills)
        chunk_sums = self._sum_chunks(packed, key, hidden.of_prefills)
        return SampledArrays(token_ids, acceptance, logprobs, prompt_logprobs, chunk_sums)

    def _verified(
        self,
        packed: PackedInputs,
        width: int,
        hidden: jax.Array,
        in_flight: Iterable[DeviceStep],
    ) -> tuple[jax.Array, Acceptance | None, TokenLogprobs[jax.Array] | None]:
        """Samples `width` tokens for each of a step's rows, and verifies their drafts."""
        sampled, state = packed.sampled, self._state
        if state.speculation is None:
            token_ids, logprobs = self._draw(packed, width, hidden, in_flight)
            return token_ids, None, logprobs
        for chunk in packed.plan.prefills:
            if chunk.samples:
                self._kinds.set_history(state, chunk)
        token_ids, logprobs = self._draw(packed, width, hidden, in_flight)
        acceptance = self._kinds.verify(state, token_ids, sampled, width, hidden)
        if acceptance.path is not None:
            self._kinds.compact(state, sampled, acceptance)
        self._kinds.proposer.verified(state, packed, width, token_ids, acceptance)
        return token_ids, acceptance, logprobs

    def _draw(
        self,
        packed: PackedInputs,
        width: int,
        hidden: jax.Array,
        in_flight: Iterable[DeviceStep],
    ) -> tuple[jax.Array, TokenLogprobs[jax.Array] | None]:
        sampled, rows = packed.sampled, packed.rows
        if all(row.plain for row in rows):
            return self._kinds.greedy(self._state, hidden, sampled, width), None
        for chunk, row in zip(sampled, rows):
            if row.stateful and chunk in packed.plan.prefills:
                admission = self._admission(chunk.seq, row)
                self._kinds.set_sampling_state(self._state, chunk.slot, admission)
        constants = [row.constants for row in rows]
        speculation = self._state.speculation
        masks = self._masks.masks(packed, width, in_flight, speculation)
        output = self._kinds.general(self._state, hidden, constants, sampled, masks, width)
        wanted = any(chunk.seq.params.logprobs is not None for chunk in sampled)
        return output.token_ids, output.logprobs if wanted else None

    def _score_prompts(
        self, packed: PackedInputs, key: ProgramKey, hidden: jax.Array
    ) -> TokenLogprobs[jax.Array] | None:
        """Log probabilities of the token after each prefill token, if a request asks for them."""
        prefills = packed.plan.prefills
        if all(chunk.seq.params.prompt_logprobs is None for chunk in prefills):
            return None
        return self._kinds.prompt_logprobs(self._state, key, hidden, prefills)

    def _sum_chunks(
        self, packed: PackedInputs, key: ProgramKey, hidden: jax.Array
    ) -> jax.Array | None:
        """Sums of the hidden states of each prefill chunk, if those of one are pooled."""
        prefills = packed.plan.prefills
        if not any(chunk.seq.needs_all_hidden_states for chunk in prefills):
            return None
        return self._kinds.sum_chunks(self._state, key, hidden, prefills)

    def _admission(self, seq: Sequence, row: SamplingRow) -> np.ndarray:
        return self._kinds.set_sampling_state.pack(seq, row.eos_token_ids, row.bad_word_ids)
