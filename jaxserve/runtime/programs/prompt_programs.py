"""Kinds of programs that score the tokens of prompts and pool their hidden states.

There is one program of each kind: steps leave the hidden states of their prefill tokens with room
for those of the largest step, and a program computes the tiles that have some.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxserve.core.model_config import ModelConfig
from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.core.steps.plan import ScheduledChunk
from jaxserve.core.steps.results import TokenLogprobs
from jaxserve.models import parallel
from jaxserve.models.family import Family, Params
from jaxserve.runtime.programs.device_state import DeviceState
from jaxserve.runtime.programs.layout.tiles import scan_tiles
from jaxserve.runtime.programs.program_kind import ProgramKind, padded
from jaxserve.runtime.programs.sampling_programs import HeadKind
from jaxserve.sampling import token_logprobs
from sharding_rules import SEQ

SCORE_TILE = 32
"""Tokens scored at a time."""
SUM_TILE = 512
"""Tokens whose hidden states are summed at a time."""


def prompt_logprobs(
    family: Family,
    config: ModelConfig,
    tile: int | None,
    head: Params,
    hidden: jax.Array,
    targets: jax.Array,
    count: jax.Array,
) -> TokenLogprobs[jax.Array]:
    """Log probabilities of `targets` int32 [tokens], the token after each prefill token of a step
    and padding. `hidden` [room, hidden] has on each rank of `seq` the hidden states of `count` of
    these tokens, int32, and padding. `tile` as in StepLayout."""

    def score(carry, arrays):
        hidden, targets = arrays
        logits = family.logits(head, config, parallel.of_last_stage(hidden))
        return carry, token_logprobs(logits, targets, jnp.bool_(True))

    # Always tiled: logits [tokens, vocab] of a whole prompt would not fit.
    tile, room = tile or SCORE_TILE, len(hidden)
    arrays = _whole_tiles((hidden, _own(targets, room, count)), tile)
    _, scored = scan_tiles(score, (), arrays, tile, count)
    return jax.tree.map(lambda array: _of_all(array[:room], count), scored)


def sum_chunks(
    num_chunks: int, hidden: jax.Array, chunks: jax.Array, count: jax.Array
) -> jax.Array:
    """Sums float32 [num_chunks, hidden] of the hidden states of each chunk; `chunks` int32 [tokens]
    numbers that of each token, with `num_chunks` for padding. `hidden` and `count` as in
    `prompt_logprobs`."""

    def add(sums, arrays):
        hidden, chunks = arrays
        hidden = parallel.of_last_stage(hidden).astype(jnp.float32)
        hidden = jnp.where((chunks < num_chunks)[:, None], hidden, 0)
        member = (chunks == jnp.arange(num_chunks)[:, None]).astype(jnp.float32)
        return sums + jnp.matmul(member, hidden, precision=lax.Precision.HIGHEST), ()

    room, features = hidden.shape
    own = jnp.where(jnp.arange(room) < count, _own(chunks, room, count), num_chunks)
    arrays = _whole_tiles((hidden, own), SUM_TILE)
    none = jnp.zeros((num_chunks, features), jnp.float32)
    sums, _ = scan_tiles(add, none, arrays, SUM_TILE, count)
    return lax.psum(sums, SEQ) if parallel.bound(SEQ) else sums


def _own(of_tokens: jax.Array, room: int, count: jax.Array) -> jax.Array:
    """Of an array [tokens] `room` entries from those of this rank's tokens on, where each rank of
    `seq` has `count` of them."""
    if not parallel.bound(SEQ):
        return of_tokens
    return lax.dynamic_slice_in_dim(of_tokens, lax.axis_index(SEQ) * count, room)


def _of_all(own: jax.Array, count: jax.Array) -> jax.Array:
    """The first `count` entries of the arrays [room, ...] of all ranks of `seq`, then padding:
    [ranks * room, ...]."""
    if not parallel.bound(SEQ):
        return own
    room = len(own)
    every = lax.all_gather(own, SEQ, tiled=True)
    token = jnp.arange(len(every))
    return every[token // count * room + token % count]


def _whole_tiles(arrays: Any, tile: int) -> Any:
    """Arrays [entries, ...] with zeros up to whole tiles."""

    def whole(array: jax.Array) -> jax.Array:
        return jnp.pad(array, [(0, -len(array) % tile)] + [(0, 0)] * (array.ndim - 1))

    return jax.tree.map(whole, arrays)


class _PromptKind(ProgramKind[int]):
    """A kind of one program over the prefill tokens of a step, with a number for each."""

    @property
    def room(self) -> int:
        """Prefill tokens of the largest step."""
        return self.shapes.buckets.max_prefill_tokens

    def keys(self) -> Iterable[int]:
        return (self.room,)

    def uploads(self, key: int) -> tuple[Any, ...]:
        shapes = self.shapes
        hidden = shapes.prefill_hidden(ProgramKey(0, key), staged=True)
        return hidden, shapes.int32(key), shapes.int32()

    def after(
        self,
        state: DeviceState,
        step: ProgramKey,
        hidden: jax.Array,
        prefills: SequenceOf[ScheduledChunk],
        numbers: np.ndarray,
    ) -> Any:
        """Calls the program after a step, with int32 `numbers` [room] of its tokens."""
        if self.shapes.seq > 1:  # Ranks have equal shares, of padding too.
            count = step.prefill_tokens // self.shapes.seq
        else:
            count = sum(chunk.num_tokens for chunk in prefills)
        return self.run(state, self.room, hidden, numbers, np.int32(count))


class PromptLogprobs(_PromptKind, HeadKind):
    """Log probabilities of the token after each prefill token."""

    title = "prompt-logprobs"
    reads = ("outside_layers",)
    outputs = (P(),)
    pure = prompt_logprobs

    def __call__(
        self,
        state: DeviceState,
        step: ProgramKey,
        hidden: jax.Array,
        prefills: SequenceOf[ScheduledChunk],
    ) -> TokenLogprobs[jax.Array]:
        """One row for each prefill token of a step, then padding."""
        targets, start = np.zeros(self.room, np.int32), 0
        for chunk in prefills:
            first = chunk.start + 1
            following = chunk.seq.prompt_token_ids[first : first + chunk.num_tokens]
            targets[start : start + len(following)] = following
            start += chunk.num_tokens
        return self.after(state, step, hidden, prefills, targets)


class SumChunks(_PromptKind):
    """Sums of the hidden states of each prefill chunk of a step."""

    title = "sum-chunks"
    outputs = (P(),)
    pure = sum_chunks

    def static(self, key: int) -> tuple[Any, ...]:
        return (self.num_chunks,)

    @property
    def num_chunks(self) -> int:
        """Most chunks of a step."""
        return min(self.shapes.config.max_num_seqs, self.room)

    def __call__(
        self,
        state: DeviceState,
        step: ProgramKey,
        hidden: jax.Array,
        prefills: SequenceOf[ScheduledChunk],
    ) -> jax.Array:
        """float32 [at least as many chunks, hidden]."""
        lengths = [chunk.num_tokens for chunk in prefills]
        numbers = np.repeat(np.arange(len(lengths)), lengths)
        numbers = padded(numbers, self.room, self.num_chunks)
        return self.after(state, step, hidden, prefills, numbers)
