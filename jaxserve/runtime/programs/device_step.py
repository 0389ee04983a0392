"""A step in flight on the devices: its uploads and its arrays."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxserve.core.events import DraftTree
from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.core.steps.plan import ScheduledChunk, StepPlan
from jaxserve.core.steps.results import DispatchedStep, PackedStep, TokenLogprobs
from jaxserve.runtime.programs.layout.frozen_plan import FrozenPlan
from jaxserve.sampling.speculation import Acceptance

if TYPE_CHECKING:  # Grammars and tokenizers determine no program (program_sources.py).
    from jaxserve.structured.matcher import TokenMatcher


@dataclasses.dataclass(frozen=True)
class SamplingRow:
    """A sequence's sampling data, held by the runner from registration until it finishes."""

    constants: np.ndarray
    plain: bool
    """Whether it only needs the most likely token, so that the greedy program suffices."""
    stateful: bool
    matcher: TokenMatcher | None
    bad_word_ids: tuple[tuple[int, ...], ...]
    eos_token_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class PackedInputs(PackedStep):
    """A packed step with its uploads."""

    frozen: FrozenPlan
    sampled: tuple[ScheduledChunk, ...]
    rows: tuple[SamplingRow, ...]
    """One per entry of `sampled`."""


class SampledArrays(NamedTuple):
    """What follows the forward pass of a step, on the device; None for what nothing asks for."""

    token_ids: jax.Array | None
    """`width` tokens for each sampled row."""
    acceptance: Acceptance | None
    """With speculation, how many of them are accepted; without it the only one."""
    logprobs: TokenLogprobs[jax.Array] | None
    prompt_logprobs: TokenLogprobs[jax.Array] | None
    chunk_sums: jax.Array | None
    """Of each prefill chunk, if some are pooled."""

    @property
    def to_host(self) -> Any:
        """Those that the host reads of every step."""
        return self._replace(acceptance=self.acceptance and self.acceptance._replace(drafts=None))


@dataclasses.dataclass(frozen=True)
class DeviceStep(DispatchedStep):
    """A dispatched step with its arrays, which the device may not have computed yet."""

    sampled: tuple[ScheduledChunk, ...]
    hidden: jax.Array
    """Hidden states to sample from. `read` waits for them even if nothing was sampled: the host
    must not run ahead by all the chunks of a long prompt."""
    arrays: SampledArrays

    @property
    def pools(self) -> bool:
        """Whether the hidden states of some sequence are pooled."""
        return any(chunk.seq.pooling is not None for chunk in self.sampled)

    @property
    def is_ready(self) -> bool:
        """Whether the devices have computed it."""
        return (self.hidden if self.arrays.token_ids is None else self.arrays.token_ids).is_ready()

    @property
    def width(self) -> int:
        return self.key.width

    def tokens(self) -> list[list[int]]:
        """The tokens that each of `sampled` gained; none if nothing was sampled. Waits for them."""
        if self.arrays.token_ids is None:
            return []
        count = len(self.sampled)
        token_ids = np.asarray(self.arrays.token_ids)[self._order()]
        rows = token_ids.reshape(count, self.width).tolist()
        if self.arrays.acceptance is None:
            return rows
        accepted = np.asarray(self.arrays.acceptance.num_tokens).tolist()
        return [row[:num_tokens] for row, num_tokens in zip(rows, accepted)]

    def sampled_logprobs(self) -> TokenLogprobs[np.ndarray] | None:
        """`logprobs` on the host, those of accepted tokens in their order. Waits for them."""
        if self.arrays.logprobs is None:
            return None
        order = self._order()
        return jax.tree.map(lambda array: np.asarray(array)[order], self.arrays.logprobs)

    def draft_trees(self) -> list[DraftTree]:
        """As DispatchedStep, copied to the host here."""
        if self.arrays.acceptance is None or self.arrays.acceptance.drafts is None:
            return []
        token_ids, parents = map(np.asarray, self.arrays.acceptance.drafts)
        accepted, path = np.asarray(self.arrays.acceptance.num_tokens), self.arrays.acceptance.path
        nodes = np.arange(self.width)[None] if path is None else np.asarray(path)
        nodes = np.broadcast_to(nodes, (len(token_ids), nodes.shape[1]))
        return [
            DraftTree(
                tuple(token_ids[row, : chunk.num_drafts].tolist()),
                tuple(parents[row, : chunk.num_drafts].tolist()),
                tuple(nodes[row, 1 : accepted[row]].tolist()),
            )
            for row, chunk in enumerate(self.sampled)
        ]

    def _order(self) -> np.ndarray:
        """Indices of the `width` tokens of each of `sampled`: of a tree those of the nodes that
        were accepted come first, in their order."""
        count = len(self.sampled)
        order = np.arange(count * self.width).reshape(count, self.width)
        if self.arrays.acceptance is not None and self.arrays.acceptance.path is not None:
            path = np.asarray(self.arrays.acceptance.path)[:count]
            order[:, : path.shape[1]] = order[:, :1] + path
        return order.reshape(-1)


BUBBLE = PackedInputs(-1, StepPlan(), ProgramKey(0, 0), FrozenPlan(), (), ())
"""Pipeline bubble: a stage without a step."""
