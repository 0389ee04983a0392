"""A sequence: one sampled continuation of a prompt, and how far the device has got with it."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

from jaxserve.kv.table import PageTable

if TYPE_CHECKING:
    from jaxserve.engine.shared_prefix import SharedPrefix
    from jaxserve.sampling_params import SamplingParams


class Status(enum.Enum):
    """Where a sequence is. RUNNING means that it holds pages and a slot, or has just used them
    up: its last token is dispatched and only waits to be collected."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """The mutable record of one sequence. Only the scheduler changes its state fields.

    Steps are dispatched before the tokens of the step before have been read, so the state runs
    ahead of the host: `num_computed` counts KV entries that *dispatched* steps have written, and
    `num_in_flight` counts sampled tokens that exist on the device but not yet in
    `output_token_ids`. Always `num_computed < num_tokens` while the sequence is unfinished.
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
    """Sequences share pages with those of the same salt alone."""
    prefixes: tuple[SharedPrefix, ...] = ()

    priority_ageing_us: int | None = None
    """Waiting that one level of priority is worth, set when it is added to a scheduler. None where
    no waiting outweighs a level."""
    order: tuple[int, int, int] = dataclasses.field(init=False)
    """Sort key of every queue: level, time, id. With strict priorities the level is its priority
    (lower runs first) and the time its arrival; with ageing there is one level, and the time is
    later by `priority_ageing_us` for each level of its priority."""
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    num_in_flight: int = 0
    num_computed: int = 0
    prefill_end: int = 0
    """Tokens that had to be prefilled when it was last admitted; from there on it decodes."""
    kv_limit: int = 0
    """KV entries it can ever need, set when it is added to a scheduler: those of its prompt and of
    all it may sample but the last token, which is never fed back."""
    table: PageTable = dataclasses.field(init=False)
    num_prefilled: int = 0
    """Tokens it has ever computed, or found computed, before it was last preempted."""
    ready_at: int = 0
    """Step from which on its newest token lies on the device, for the next to be computed from."""
    slot: int | None = None
    """Its row of per-sequence device state; stable while it runs."""
    status: Status = Status.WAITING
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.table = PageTable(self.token_ids, self.salt)
        self.set_priority(self.priority)

    def set_priority(self, priority: int) -> None:
        """Changes its place in every queue; it must be in none."""
        self.priority = priority
        if self.priority_ageing_us is None:
            self.order = (priority, self.arrival_us, self.seq_id)
        else:
            aged_us = self.arrival_us + priority * self.priority_ageing_us
            self.order = (0, aged_us, self.seq_id)

    @property
    def pages(self) -> list[int]:
        """Its pages on the device, in the order they fill."""
        return self.table.pages

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output(self) -> int:
        """Tokens sampled so far, read by the host or not."""
        return len(self.output_token_ids) + self.num_in_flight

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_in_flight

    @property
    def num_written(self) -> int:
        """Tokens the host knows whose KV dispatched steps have written."""
        return min(self.num_computed, len(self.prompt_token_ids) + len(self.output_token_ids))

    @property
    def num_reusable(self) -> int:
        """Tokens that it need not compute if their KV is found: one must be, to go on from, and all
        whose log probabilities were asked for."""
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
        return self.kv_limit - len(self.prompt_token_ids) + 1

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens at positions `start .. stop - 1`, which the host must know."""
        num_prompt = self.num_prompt
        if stop <= num_prompt:
            return self.prompt_token_ids[start:stop]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - num_prompt]
