"""Output records: frozen dataclasses, the same offline, streaming and over HTTP."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(frozen=True)
class Logprob:
    """Natural log probability of one token under the raw (unprocessed) distribution.

    `rank` is 1 for the most likely token; tokens of equal probability share the better rank. Those
    of `logprob_token_ids` have none, unless they are sampled.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None = None


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """Times of one request in integer microseconds on the engine's clock, and cache use.

    `queue_us` is how long the request waited before its first step. A time is None until the event
    has happened. `cached_tokens` counts prompt tokens whose keys and values were not recomputed.
    With speculation `num_drafts` counts the drafts that steps verified, one for each sequence and
    step, `num_draft_tokens` their tokens and `num_accepted_tokens` those accepted; of a request
    that came from another engine, those of the engine that ended it.
    """

    arrival_us: int
    first_token_us: int | None = None
    finish_us: int | None = None
    queue_us: int | None = None
    cached_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class WeightsRun(NamedTuple):
    """Consecutive tokens of an output that were made by one version of the weights."""

    version: int
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One sampled continuation; a request with n > 1 has n of them, numbered by `index`.

    `logprobs` has one dict per position, from token id to Logprob: the k most likely tokens and the
    sampled one, so k+1 entries when the sampled token is not among them.
    `stop_reason` is the stop string or token id that ended it, None for end-of-sequence tokens.
    `weights` has the versions of the weights that made its tokens, in order: 0 until
    `update_weights`.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    weights: tuple[WeightsRun, ...] = ()

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A request and everything generated for it so far; final once `finished`.

    `prompt` is None for a prompt given as token ids. `prompt_logprobs` is None unless requested;
    its first entry is None because nothing precedes the first token. `error` is the error message
    when the outputs' finish_reason is "error". `embedding` is that of a request with PoolingParams.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None
    embedding: list[float] | None = None


class Delta(NamedTuple):
    """New output of one sequence of a streamed request: its new tokens and final text.

    Text may lag behind the tokens (half a character, the beginning of a stop string). The last
    delta of a sequence has its `finish_reason`.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
