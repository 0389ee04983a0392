"""A dense beam search, which recomputes every prefix with the oracle."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from tiny_engines import EOS, MIN_MARGIN


@dataclasses.dataclass(frozen=True)
class Found:
    tokens: tuple[int, ...]
    total: float
    ended: bool = False

    def length(self):
        return len(self.tokens) - self.ended

    def score(self, penalty):
        return self.total / self.length() ** penalty


def ranked(found, penalty, decided):
    """Best first; no rounding may change the order of the first `decided`, or who they are."""
    order = sorted(found, key=lambda each: each.score(penalty), reverse=True)
    for better, worse in itertools.pairwise(order[: decided + 1]):
        lead = better.score(penalty) - worse.score(penalty)
        assert lead * better.length() ** penalty > MIN_MARGIN, "rounding could decide"
    return order


def dense_search(next_logprobs, prompt, params):
    live, ended = [Found(tuple(prompt), 0.0)], []
    for _ in range(params.max_tokens):
        children = []
        for beam in live:
            logprobs = next_logprobs(beam.tokens)
            most_likely = np.argsort(-logprobs)[: 2 * params.beam_width + 1].tolist()
            last, next_one = logprobs[most_likely[-2:]]
            assert EOS not in most_likely[-2:] or last - next_one > MIN_MARGIN
            for token in most_likely[:-1]:
                total = beam.total + logprobs[token]
                ends = token == EOS and not params.ignore_eos
                children.append(Found((*beam.tokens, token), total, ends))
        ended += [child for child in children if child.ended]
        live = [child for child in children if not child.ended]
        live = ranked(live, params.length_penalty, params.beam_width)[: params.beam_width]
    return ranked(ended + live, params.length_penalty, params.beam_width)[: params.beam_width]


def check_beams(sequences, expected, penalty, num_prompt):
    assert [sequence.tokens for sequence in sequences] == [each.tokens for each in expected]
    for sequence, each in zip(sequences, expected):
        assert sequence.finish_reason == ("stop" if each.ended else "length")
        assert sequence.cum_logprob == pytest.approx(each.total, abs=1e-4)
        assert sequence.score == pytest.approx(each.score(penalty), abs=1e-4)
        steps = zip(sequence.tokens[num_prompt:], sequence.logprobs, strict=True)
        total = sum(entry[token].logprob for token, entry in steps)
        assert sequence.cum_logprob == pytest.approx(total, abs=1e-9)
