"""Choosing the next token on the device: pure functions of static shape, compiled ahead of time.

`greedy` is the program for batches that only need the most likely token. `general` does
everything else and skips, at run time, what no row of the batch requested. `SamplingState` holds
per-sequence history (counts, bans), one row per slot.
"""

from jaxserve.core.steps.results import NO_TOKEN, TokenLogprobs
from jaxserve.sampling.logprobs import TOP_LOGPROBS, token_logprobs
from jaxserve.sampling.rows import pack_rows, row_constants
from jaxserve.sampling.sample import (
    SampleOutput,
    candidates,
    distribution,
    general,
    greedy,
    most_likely,
    record_sampled,
)
from jaxserve.sampling.state import (
    BY_TOKEN,
    SamplingState,
    abstract_state,
    admit,
    needs_state,
    pack_admission,
    tokens_per_rank,
)

__all__ = [
    "BY_TOKEN",
    "NO_TOKEN",
    "TOP_LOGPROBS",
    "SampleOutput",
    "SamplingState",
    "TokenLogprobs",
    "abstract_state",
    "admit",
    "candidates",
    "distribution",
    "general",
    "greedy",
    "most_likely",
    "needs_state",
    "pack_admission",
    "pack_rows",
    "record_sampled",
    "row_constants",
    "token_logprobs",
    "tokens_per_rank",
]
