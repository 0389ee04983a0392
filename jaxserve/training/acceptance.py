"""How many drafts of a drafter the model accepts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.llm import LLM
from jaxserve.training.targets import NUM_STREAMS


@dataclasses.dataclass(frozen=True)
class MeasuredAcceptance:
    """Of drafts of several tokens, each for one step of one sequence.

    Attributes:
        by_position: the share of drafts that were right up to and with each position.
        tokens_per_step: tokens that a sequence gains by a step, the model's own included.
    """

    by_position: tuple[float, ...]
    tokens_per_step: float


def acceptance(
    model: str | Path | None,
    method: str,
    drafter: Path,
    num_drafts: int,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
) -> MeasuredAcceptance:
    """What the drafter in a directory gains on prompts, in tokens, answered greedily."""
    drafts = {"method": method, "model": str(drafter), "num_speculative_tokens": num_drafts}
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    streams = min(NUM_STREAMS, len(prompts))
    with LLM(model, max_num_seqs=streams, speculative_config=drafts) as llm:
        llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
        metrics = llm.get_metrics()
    counts = metrics["vllm:spec_decode_num_accepted_tokens_per_pos_total"].value
    drafts = max(1, metrics["vllm:spec_decode_num_drafts_total"].value)
    shares = tuple(counts.get(str(place), 0) / drafts for place in range(num_drafts))
    return MeasuredAcceptance(shares, 1 + sum(shares))
