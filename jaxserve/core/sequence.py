"""A sequence: one sampled continuation of a prompt, and how much of it has been computed."""

from __future__ import annotations

import dataclasses
import enum

from jaxserve.core.requests.lora import LoadedAdapter
from jaxserve.core.requests.pooling import PoolingParams
from jaxserve.core.requests.sampling_params import SamplingParams


class SequenceState(enum.Enum):
    """The states of a sequence. Only `Sequence.transition` changes them.

    WAITING: in the request queue; `Sequence.started` tells a preempted sequence from a new one.
    ADMITTED: holds pages and a slot, but no step has computed any of its tokens since. Pages that
        are fetched from a lower tier may still be in transfer.
    RUNNING: steps compute its tokens.
    DRAINING: all its tokens are sampled, and the last ones are still to be read by the host.
    FINISHED: ended, with a finish reason.
    """

    WAITING = enum.auto()
    ADMITTED = enum.auto()
    RUNNING = enum.auto()
    DRAINING = enum.auto()
    FINISHED = enum.auto()


_TRANSITIONS = {
    SequenceState.WAITING: {SequenceState.ADMITTED, SequenceState.FINISHED},
    SequenceState.ADMITTED: {
        SequenceState.RUNNING,
        SequenceState.WAITING,
        SequenceState.FINISHED,
    },
    SequenceState.RUNNING: {
        SequenceState.DRAINING,
        SequenceState.WAITING,
        SequenceState.FINISHED,
    },
    SequenceState.DRAINING: {SequenceState.FINISHED},
    SequenceState.FINISHED: set(),
}


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """The mutable record of one sequence. Once a scheduler has it, only that changes its state and
    counters; before that, a snapshot may restore them.

    Steps are dispatched before the tokens of the previous step have been read, so the counters run
    ahead of the host: `num_computed` counts KV entries that *dispatched* steps have written, and
    `num_in_flight` counts sampled tokens that exist on the device but not yet in
    `output_token_ids`. A step in flight counts as one token in both; together those in flight may
    accept up to `num_drafts_in_flight` drafts as well. Always `num_computed < num_tokens` while the
    sequence is unfinished.
    """

    seq_id: int
    request_id: str
    index: int
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_us: int
    priority: int = 0
    tenant: str | None = None
    cache_salt: str | None = None
    salt: bytes = b""
    """Sequences share pages only with sequences of the same salt."""
    prefixes: tuple[SharedPrefix, ...] = ()
    pooling: PoolingParams | None = None
    """It ends with its prompt, whose hidden states are pooled."""
    adapter: LoadedAdapter | None = None

    num_prompt: int = dataclasses.field(init=False)
    """Tokens of its prompt, which does not change."""
    priority_ageing_us: int | None = None
    """Waiting time that equals one level of priority, set when the sequence is added to a
    scheduler. None: levels are strict."""
    order: tuple[int, int, int] = dataclasses.field(init=False)
    """Sort key of every queue: level, time, id. With strict priorities the level is its priority
    (lower runs first) and the time its arrival; with ageing there is one level, and the time is
    later by `priority_ageing_us` for each level of its priority."""
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    num_in_flight: int = 0
    num_computed: int = 0
    num_speculative_tokens: int = 0
    """Most drafts that each of its decodes verifies, set when it is added to a scheduler; 0 once
    its drafter has failed."""
    acceptance: tuple[float, float] | None = None
    """How likely the first draft of a step is accepted, and one after an accepted draft, where the
    scheduler chooses by that; None before any was verified."""
    num_tried: tuple[int, int] = (0, 0)
    """Drafts that these were learned from."""
    observed_at: int = 0
    """Output tokens when they were last learned from."""
    num_drafts_in_flight: int = 0
    prefill_end: int = 0
    """Tokens that had to be prefilled when it was last admitted; tokens after them are decoded."""
    kv_limit: int = 0
    """KV entries it can ever need, set when it is added to a scheduler: those of its prompt and of
    all tokens it may sample except the last, which is never fed back."""
    num_prefilled: int = 0
    """Tokens it has ever computed, or found cached, before it was last preempted."""
    ready_at: int = 0
    """Step from which its newest token is on the device, to compute the next one from."""
    slot: int | None = None
    """Its row of per-sequence device state while it holds pages."""
    state: SequenceState = SequenceState.WAITING
    started: bool = False
    """Whether a step has ever computed its tokens, here or in the engine it was restored from."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.num_prompt = len(self.prompt_token_ids)
        self.set_priority(self.priority)

    def transition(self, state: SequenceState) -> None:
        """Changes the state. Raises ValueError for a transition that does not exist."""
        if state not in _TRANSITIONS[self.state]:
            raise ValueError(f"sequence {self.seq_id} cannot go from {self.state} to {state}")
        self.state = state
        if state is SequenceState.RUNNING:
            self.started = True

    def set_priority(self, priority: int) -> None:
        """Changes its place in every queue; it must be in none."""
        self.priority = priority
        if self.priority_ageing_us is None:
            self.order = (priority, self.arrival_us, self.seq_id)
        else:
            aged_us = self.arrival_us + priority * self.priority_ageing_us
            self.order = (0, aged_us, self.seq_id)

    @property
    def lora_slot(self) -> int:
        """The slot of its LoRA adapter; 0 for none."""
        return 0 if self.adapter is None else self.adapter.slot

    @property
    def num_output(self) -> int:
        """Tokens sampled so far, read by the host or not."""
        return len(self.output_token_ids) + self.num_in_flight

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + len(self.output_token_ids) + self.num_in_flight

    @property
    def needs_all_hidden_states(self) -> bool:
        """Whether the hidden states of all of its prompt are pooled."""
        return self.pooling is not None and self.pooling.pooling == "mean"

    @property
    def scored(self) -> bool:
        """Whether steps must tell the tokens of its prompt apart: for their log probabilities, or
        to pool their hidden states."""
        return self.params.prompt_logprobs is not None or self.needs_all_hidden_states

    @property
    def num_written(self) -> int:
        """Tokens the host knows whose KV dispatched steps have written."""
        return min(self.num_computed, self.num_prompt + len(self.output_token_ids))

    @property
    def num_reusable(self) -> int:
        """Tokens it need not compute if their KV is cached: all but one, to continue from, but
        those whose log probabilities were requested, and none if all hidden states are needed."""
        if self.needs_all_hidden_states:
            return 0
        if self.params.prompt_logprobs is not None and self.index == 0:
            return min(self.num_prefilled, self.num_tokens - 1)
        return self.num_tokens - 1

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed; 1 for a decode."""
        return self.num_tokens - self.num_computed

    @property
    def max_tokens(self) -> int:
        """The most tokens it may sample: `params.max_tokens` within the context limit."""
        return self.kv_limit - self.num_prompt + 1

    @property
    def waiting(self) -> bool:
        return self.state is SequenceState.WAITING

    @property
    def active(self) -> bool:
        """Whether it was admitted and has not finished."""
        return self.state not in (SequenceState.WAITING, SequenceState.FINISHED)

    @property
    def finished(self) -> bool:
        return self.state is SequenceState.FINISHED

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens at positions `start .. stop - 1`, which the host must know."""
        num_prompt = self.num_prompt
        if stop <= num_prompt:
            return self.prompt_token_ids[start:stop]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - num_prompt]


@dataclasses.dataclass(eq=False)
class SharedPrefix:
    """The first `num_tokens` tokens of several sequences: the prompt of a request with several
    samples, or the common prefix of prompts in a list (BatchLLM, Zheng et al. 2025).

    The first member to run is the leader: it computes the prefix while the others wait for it.
    Its pages are then pinned until the last member has finished.
    """

    num_tokens: int
    num_members: int = 0
    leader: Sequence | None = None
    ready: bool = False

    def keeps_waiting(self, seq: Sequence) -> bool:
        """Whether `seq` must wait because another member is computing the prefix."""
        leader = self.leader
        return not self.ready and leader is not None and leader is not seq and leader.active
