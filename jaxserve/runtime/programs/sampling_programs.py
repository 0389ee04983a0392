"""Kinds of programs that sample tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxserve.core.model_config import ModelConfig
from jaxserve.core.sequence import Sequence
from jaxserve.core.steps.plan import ScheduledChunk
from jaxserve.models import parallel
from jaxserve.models.family import Family, Params
from jaxserve.runtime.programs.device_state import DeviceState
from jaxserve.runtime.programs.layout.tiles import scan_tiles
from jaxserve.runtime.programs.program_kind import ProgramKind, padded
from jaxserve.sampling import (
    SampleOutput,
    SamplingState,
    admit,
    pack_admission,
    pack_rows,
    record_sampled,
    tokens_per_rank,
)
from jaxserve.sampling import general as sample_general
from jaxserve.sampling import greedy as sample_greedy
from jaxserve.sampling.acceptance import AcceptanceRule, Drafted
from jaxserve.sampling.processors import Processors
from jaxserve.sampling.rows import (
    FLAG_TRACK,
    FLAG_VERIFIES,
    FLAGS,
    NUM_FIELDS,
    PLACE,
    POSITION,
    SLOT,
)
from jaxserve.sampling.speculation import (
    SpeculationState,
    accepted_nodes,
    following_drafts,
    path_tokens,
)


def greedy(
    family: Family,
    config: ModelConfig,
    tile: int | None,
    head: Params,
    last_tokens: jax.Array,
    hidden: jax.Array,
    slots: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Most likely token int32 [rows] for the sequences in `slots` [rows], from the first rows
    of hidden [sample_width, hidden].

    `tile` as in StepLayout. Returns `last_tokens` with the tokens in their slots, and the tokens.
    """

    def sample(carry, hidden):
        return carry, sample_greedy(family.logits(head, config, hidden))

    hidden = _first(hidden, len(slots))
    _, token_ids = scan_tiles(sample, (), hidden, tile, _num_real(last_tokens, slots))
    return last_tokens.at[slots].set(jnp.maximum(token_ids, 0)), token_ids


def _first(hidden: jax.Array, rows: int) -> jax.Array:
    """The first rows of hidden states, as an array of its own: XLA fuses a slice of one row with
    the product that follows, and then finds no code for it on GPUs."""
    return lax.optimization_barrier(hidden[:rows])


def general(
    family: Family,
    config: ModelConfig,
    tile: int | None,
    processors: Processors,
    tree_depth: int,
    branches: int,
    rule: AcceptanceRule | None,
    head: Params,
    last_tokens: jax.Array,
    state: SamplingState,
    speculation: SpeculationState | None,
    hidden: jax.Array,
    rows: jax.Array,
    masks: jax.Array,
) -> tuple[jax.Array, SamplingState, SampleOutput]:
    """Sample one token per row with all sampling parameters. `rows` come from `pack_rows`; `masks`
    int32 [rows, mask_words] are the masks of rows with a grammar. With `speculation`, positions
    count from the length of the sequence, and drafts are accepted by the `rule`; None is the exact
    one. `tile` and `tree_depth` as in StepLayout: of trees PLACE is the node, and at most
    `branches` drafts follow a token."""

    def sample(carry, arrays):
        hidden, rows, masks, drafts, drafted = arrays
        logits = family.logits(head, config, hidden)
        output, _ = sample_general(logits, state, rows, masks, processors, drafts, rule, drafted)
        return carry, output

    slots, drafts, drafted, accepted = rows[:, SLOT], None, None, None
    if speculation is not None:
        rows = rows.at[:, POSITION].add(speculation.lengths[slots])
        drafts, nodes = speculation.drafts[slots], rows[:, PLACE]
        if rule is not None:
            parents = speculation.parents[slots] if tree_depth else jnp.arange(drafts.shape[1])
            following = following_drafts(drafts, parents, nodes, branches)
        if tree_depth:
            paths, drafts, depths = path_tokens(speculation, tree_depth, slots, nodes)
            rows = rows.at[:, POSITION].add(depths - nodes).at[:, PLACE].set(depths)
        if rule is not None:
            probs = speculation.probs
            if probs is not None:
                probs = probs[slots, jnp.minimum(rows[:, PLACE], probs.shape[1] - 1)]
            drafted = Drafted(following, probs)
    arrays = (_first(hidden, len(rows)), rows, masks, drafts, drafted)
    _, output = scan_tiles(sample, (), arrays, tile, _num_real(last_tokens, slots))
    # After all tiles, since a tile may begin between the tokens of a sequence.
    count = tokens_per_rank(config.vocab_size, parallel.num_vocab_ranks())
    if speculation is not None and tree_depth:
        accepted = accepted_nodes(paths, drafts, depths, nodes, output.token_ids)
    state = record_sampled(state, rows, output.token_ids, count, drafts, accepted)
    return last_tokens.at[slots].set(jnp.maximum(output.token_ids, 0)), state, output


def _num_real(last_tokens: jax.Array, slots: jax.Array) -> jax.Array:
    """Rows that sample for a sequence; the rows after them are padding, in the trash slot."""
    return jnp.sum(slots != len(last_tokens) - 1)


class HeadKind(ProgramKind[int]):
    """A kind that computes logits."""

    def static(self, key: int) -> tuple[Any, ...]:
        return self.shapes.family, self.shapes.local_model, self.shapes.tile


class SampleGreedy(HeadKind):
    """The most likely token of each row."""

    title = "greedy"
    reads = ("outside_layers", "last_tokens")
    replaces = ("last_tokens",)
    outputs = (P(),)
    pure = greedy

    def keys(self) -> Iterable[int]:
        return self.shapes.sample_rows

    def uploads(self, key: int) -> tuple[Any, ...]:
        return self.shapes.sampled_hidden, self.shapes.int32(key)

    def __call__(
        self, state: DeviceState, hidden: jax.Array, chunks: SequenceOf[ScheduledChunk], width: int
    ) -> jax.Array:
        """`width` tokens for each of `chunks`, int32 [at least as many]."""
        key = self.shapes.sampled(len(chunks), width)
        slots = [chunk.slot for chunk in chunks for _ in range(width)]
        return self.run(state, key, hidden, padded(slots, key, self.shapes.trash_slot))


class SampleGeneral(HeadKind):
    """Tokens by all sampling parameters."""

    title = "general"
    reads = ("outside_layers", "last_tokens", "sampling", "speculation")
    replaces = ("last_tokens", "sampling")
    outputs = (P(),)
    pure = general
    applies_processors = True

    def keys(self) -> Iterable[int]:
        return self.shapes.sample_rows

    def uploads(self, key: int) -> tuple[Any, ...]:
        shapes = self.shapes
        rows = shapes.int32(key, NUM_FIELDS + self._num_processors)
        return shapes.sampled_hidden, rows, shapes.abstract_state.no_masks[key]

    @property
    def _num_processors(self) -> int:
        return len(self.shapes.processors.names)

    def static(self, key: int) -> tuple[Any, ...]:
        drafts = self.shapes.config.speculative_config
        branches = 1 if drafts is None else drafts.branches
        rule = None if drafts is None else AcceptanceRule.of(drafts)
        processors, tree_depth = self.shapes.processors, self.shapes.tree_depth
        return (*super().static(key), processors, tree_depth, branches, rule)

    def __call__(
        self,
        state: DeviceState,
        hidden: jax.Array,
        constants: SequenceOf[np.ndarray],
        chunks: SequenceOf[ScheduledChunk],
        masks: Mapping[int, np.ndarray],
        width: int,
    ) -> SampleOutput:
        """Samples `width` tokens for each of `chunks`, with its row of `constants`; `masks` has the
        grammar's masks of some of these tokens, by their number."""
        key, trash = self.shapes.sampled(len(chunks), width), self.shapes.trash_slot
        if state.speculation is None:
            slots, positions = zip(*((chunk.slot, chunk.output_index) for chunk in chunks))
            rows = pack_rows(constants, slots, positions, key, trash, self._num_processors)
        else:
            rows = self._pack_drafted(constants, chunks, width, key)
        all_masks = state.no_masks[key]
        if masks:
            all_masks = np.zeros(all_masks.shape, np.int32)
            for row, mask in masks.items():
                all_masks[row] = mask
        return self.run(state, key, hidden, rows, all_masks)

    def _pack_drafted(
        self,
        constants: SequenceOf[np.ndarray],
        chunks: SequenceOf[ScheduledChunk],
        width: int,
        key: int,
    ) -> np.ndarray:
        """Rows whose positions count from the length of the sequence, which the device adds; those
        after drafts that no step verifies are not recorded."""
        tokens = [(row, place) for row in range(len(chunks)) for place in range(width)]
        rows = pack_rows(
            [constants[row] for row, _ in tokens],
            [chunks[row].slot for row, _ in tokens],
            [place - chunks[row].seq.num_prompt for row, place in tokens],
            key,
            self.shapes.trash_slot,
            self._num_processors,
        )
        places = rows[: len(tokens), PLACE] = [place for _, place in tokens]
        verified = [chunks[row].num_drafts for row, _ in tokens]
        rows[: len(tokens), FLAGS][np.greater(places, verified)] &= ~FLAG_TRACK
        rows[: len(tokens), FLAGS][np.less(places, verified)] |= FLAG_VERIFIES
        return rows


class SetSamplingState(ProgramKind[int]):
    """Fills a slot's row of sampling state, which another sequence may have used."""

    title = "set-sampling-state"
    pure = admit
    reads = replaces = ("sampling",)

    def keys(self) -> Iterable[int]:
        """Elements of a slot's state."""
        arrays = jax.tree.leaves(self.shapes.abstract_state.sampling)
        return (sum(array.size // array.shape[0] for array in arrays),)

    def uploads(self, key: int) -> tuple[Any, ...]:
        return self.shapes.int32(), self.shapes.int32(key)

    def pack(
        self,
        seq: Sequence,
        eos_token_ids: tuple[int, ...],
        bad_word_ids: SequenceOf[SequenceOf[int]],
    ) -> np.ndarray:
        """A sequence's row. Raises RequestError when it has too many or too long bad words."""
        return pack_admission(
            seq.params,
            self.shapes.model.vocab_size,
            seq.prompt_token_ids,
            seq.output_token_ids,
            eos_token_ids=eos_token_ids,
            bad_word_ids=bad_word_ids,
            ranks=self.shapes.vocab_ranks,
        )

    def __call__(self, state: DeviceState, slot: int, row: np.ndarray) -> None:
        self.run(state, len(row), np.int32(slot), row)
