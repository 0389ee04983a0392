"""The masks of a step's tokens, from the matchers of their sequences."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from jaxserve.core.sequence import Sequence
from jaxserve.core.steps.plan import ScheduledChunk, StepPlan
from jaxserve.core.steps.results import NO_TOKEN
from jaxserve.runtime.programs.device_step import DeviceStep, PackedInputs, SamplingRow
from jaxserve.sampling.speculation import SpeculationState
from jaxserve.structured.lookahead import Forced, look_ahead
from jaxserve.structured.matcher import TokenMatcher, advance


class GrammarMasks:
    """Masks, and drafts that follow from them.

    A matcher needs all previous tokens of its sequence, so the host waits for those, and reads the
    drafts, while the devices run the forward pass of the step to be masked.
    """

    def __init__(self, rows: Mapping[int, SamplingRow]) -> None:
        """`rows`: the sampling data of each registered sequence, by its id."""
        self._rows = rows
        self._forced: dict[int, Forced] = {}

    def forget(self, seq: Sequence) -> None:
        self._forced.pop(seq.seq_id, None)

    def masks(
        self,
        packed: PackedInputs,
        width: int,
        in_flight: Iterable[DeviceStep],
        speculation: SpeculationState | None,
    ) -> dict[int, np.ndarray]:
        """Masks by the number of a sampled token, `width` for each of a step's rows; `in_flight`
        are the steps before it that are not read."""
        matched = [
            (row_index, row.matcher, chunk)
            for row_index, (row, chunk) in enumerate(zip(packed.rows, packed.sampled))
            if row.matcher is not None
        ]
        if not matched:
            return {}
        waiting = {
            row_index
            for row_index, matcher, chunk in matched
            if matcher.waits_for(chunk.output_index + chunk.num_lookahead_tokens)
        }
        if waiting:
            self._advance(in_flight)
        if speculation is None:
            return {row_index: matcher.mask for row_index, matcher, _ in matched}
        masks: dict[int, np.ndarray] = {}
        drafts, parents = _drafts(speculation, width)
        for row_index, matcher, chunk in matched:
            first = row_index * width
            self.forget(chunk.seq)
            if row_index not in waiting and not matcher.forced(1):
                # As a budget of reasoning that is far from used up.
                masks |= {first + node: matcher.mask for node in range(width)}
                continue
            own = drafts[chunk.slot, : chunk.num_drafts].tolist()
            most = drafts.shape[1]
            ahead = look_ahead(matcher, own, parents[chunk.slot].tolist(), most)
            masks |= {first + node: mask for node, mask in ahead.masks.items()}
            if ahead.forced is not None:
                self._forced[chunk.seq.seq_id] = ahead.forced
        return masks

    def forced(self, plan: StepPlan) -> list[tuple[ScheduledChunk, Forced]]:
        """The decodes of a plan whose drafts grammars force, with these."""
        found = ((chunk, self._forced.pop(chunk.seq.seq_id, None)) for chunk in plan.decodes)
        return [(chunk, forced) for chunk, forced in found if forced and chunk.num_drafts]

    def _advance(self, in_flight: Iterable[DeviceStep]) -> None:
        """Lets matchers consume the tokens of the steps in flight, which it waits for."""
        counts: collections.Counter[int] = collections.Counter()
        for step in in_flight:
            tokens = [*self._tokens(step, counts)]
            for number in range(step.width):
                advance(taken for index, taken in tokens if index == number)

    def _tokens(
        self, step: DeviceStep, counts: collections.Counter[int]
    ) -> Iterator[tuple[int, tuple[TokenMatcher, int, int]]]:
        """Tokens that a step sampled for sequences with a matcher: the number of each within the
        step, and what `advance` takes. `counts`: tokens of each sequence in steps before it that
        the host has not collected."""
        for chunk, token_ids in zip(step.sampled, step.tokens()):
            seq = chunk.seq
            row = self._rows.get(seq.seq_id)
            if row is None or row.matcher is None:
                continue
            begin = len(seq.output_token_ids) + counts[seq.seq_id]
            counts[seq.seq_id] += len(token_ids)
            for number, token_id in enumerate(token_ids):
                if token_id != NO_TOKEN:
                    yield number, (row.matcher, begin + number, token_id)


def _drafts(state: SpeculationState, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The drafts of a step, and the nodes that they follow, int32 [slots + 1, k]. Waits for them:
    they were made before its forward pass."""
    shape = state.drafts.shape
    chain = np.broadcast_to(np.arange(shape[1]), shape)
    if width == 1:
        return chain, chain
    return np.asarray(state.drafts), chain if state.parents is None else np.asarray(state.parents)
