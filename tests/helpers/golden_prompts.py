"""What transformers continues prompts of SmolLM2 with, in float32, and checks against it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tiny_engines import TinyModel

from jaxserve.core.requests.outputs import RequestOutput

GOLDEN = Path(__file__).parents[1] / "models" / "golden" / "smollm2_greedy.json"
DECIDED = 1e-3
"""A lead of one logit over the next that another order of summation in float32 cannot take back."""


@dataclasses.dataclass(frozen=True)
class GoldenPrompt:
    """A prompt, the greedy tokens after it, and by how much each leads over the second one."""

    name: str
    prompt: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    margins: list[float]


def golden_prompts(*names: str) -> list[GoldenPrompt]:
    """The prompts of these names; without names, all of them."""
    entries = json.loads(GOLDEN.read_text(encoding="utf-8"))["prompts"]
    known = {entry["name"]: GoldenPrompt(**entry) for entry in entries}
    return [known[name] for name in names or known]


def check_golden(golden: Iterable[GoldenPrompt], outputs: Iterable[RequestOutput]) -> None:
    """Every output is the golden tokens, as many as its `max_tokens` allowed; after a place where
    the lead is not DECIDED it may be any other."""
    for entry, output in zip(golden, outputs, strict=True):
        (completion,) = output.outputs
        check_tokens(entry, completion.token_ids, whole=completion.finish_reason == "stop")


def check_tokens(entry: GoldenPrompt, token_ids: Sequence[int], whole: bool) -> None:
    """`whole`: the output was ended by the model, and so are the golden tokens."""
    ours, expected = list(token_ids), entry.output_token_ids
    assert ours, entry.name
    for place, (token, golden) in enumerate(zip(ours, expected)):
        if token != golden:
            lead = entry.margins[place]
            assert lead < DECIDED, f"{entry.name} differs at {place}, where {lead} decides"
            return
    assert len(ours) <= len(expected), entry.name
    if whole:
        assert len(ours) == len(expected), f"{entry.name} ends after {len(ours)} tokens"


def logits_before(model: TinyModel, prompt: Sequence[int], token_ids: Sequence[int]) -> np.ndarray:
    """The oracle's logits float32 [tokens, vocab] from which each token after a prompt comes.
    Padding at the end, which causal attention cannot see, keeps the number of compiled shapes
    small."""
    tokens = [*prompt, *token_ids]
    padded = np.zeros(-(-len(tokens) // 64) * 64, np.int32)
    padded[: len(tokens)] = tokens
    return model.logits(padded)[len(prompt) - 1 : len(tokens) - 1]


def shortfalls(logits: np.ndarray, token_ids: Sequence[int]) -> np.ndarray:
    """By how much the logit of each token is below the best one, float32 [tokens]."""
    return logits.max(axis=1) - logits[np.arange(len(token_ids)), list(token_ids)]
