"""Requests of many kinds at once, and what one device answers to them."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import pytest
from mesh_engines import load
from tiny_engines import FULL, LONGEST, PROMPT_LENGTHS, Arrival, TinyModel, drive, preemptions

from jaxserve.core.requests.outputs import RequestOutput
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.scheduler.policies import POLICIES

GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
SCORED = SamplingParams(
    temperature=0, max_tokens=LONGEST, ignore_eos=True, logprobs=2, prompt_logprobs=2
)
SEVERAL = SamplingParams(temperature=1.0, seed=7, n=2, max_tokens=12, ignore_eos=True)
SCORED_FULL = dataclasses.replace(FULL, logprobs=3)
LISTED = dataclasses.replace(GREEDY, logprob_token_ids=(255, 0, 130, 7))
CROWD = 3
"""Requests that fit when they are admitted and no longer when they have grown."""
CROWDED = PROMPT_LENGTHS.index(60)


def greedy(model: TinyModel) -> list[Arrival]:
    """Every prompt, one after another, and several of one length that share no pages."""
    arrivals = [Arrival(prompt, GREEDY, 2 * i) for i, prompt in enumerate(model.prompts)]
    crowd = [Arrival(model.prompts[CROWDED], GREEDY, tenant=f"tenant {i}") for i in range(CROWD)]
    return arrivals + crowd


def check_greedy(model: TinyModel, engine: Engine, crowded: bool = True) -> None:
    """An engine's tokens are the oracle's; `crowded`: though some sequence had to give way, where
    the policy has them grow, and all layers keep all tokens."""
    outputs = drive(engine, greedy(model))
    expected = [*model.answers, *[model.answers[CROWDED]] * CROWD]
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    grows = POLICIES[engine.plan.config.scheduler].pages == "grow"
    if crowded and grows and not engine.kv.windowed:
        assert preemptions(engine) > 0


def sampled(model: TinyModel) -> list[Arrival]:
    """Everything a request may ask for other than greedy tokens."""
    return [
        Arrival(model.prompts[index], params, step)
        for step, (index, params) in enumerate(
            [
                *((9, SCORED_FULL), (6, SEVERAL), (8, SCORED)),
                *((11, GREEDY), (10, SCORED_FULL), (7, LISTED)),
            ]
        )
    ]


def answer_alone(mesh: str, directory: Path) -> None:
    """Leaves what an engine answers beside its model, greedy answers as the oracle has them."""
    model = TinyModel.open(directory / "model")
    with load(model, mesh) as llm:
        check_greedy(model, llm.engine)
        outputs = drive(llm.engine, sampled(model))
    with open(directory / "answers.pickle", "wb") as file:
        pickle.dump((model.answers, outputs), file)


def check_answers(mesh: str, directory: Path, **settings: object) -> None:
    """An engine on `mesh` answers as one device does, and finds cached prefixes."""
    model = TinyModel.open(directory / "model")
    with open(directory / "answers.pickle", "rb") as file:
        model.answers, expected = pickle.load(file)
    with load(model, mesh, **settings) as llm:
        check_greedy(model, llm.engine)
        check_same(drive(llm.engine, sampled(model)), expected)
        drive(llm.engine, [Arrival(model.prompts[-1], GREEDY)])
        (hit,) = drive(llm.engine, [Arrival(model.prompts[-1], GREEDY)])
        assert list(hit.outputs[0].token_ids) == model.answers[-1]
        assert hit.metrics.cached_tokens >= PROMPT_LENGTHS[-1] // 2


def check_same(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """The same tokens, and log probabilities within rounding."""
    for output, other in zip(outputs, expected, strict=True):
        assert tokens(output) == tokens(other)
        for ours, theirs in zip(scores(output), scores(other), strict=True):
            assert ours.keys() == theirs.keys()
            for token, entry in ours.items():
                assert entry.logprob == pytest.approx(theirs[token].logprob, abs=1e-3)
                assert entry.rank == theirs[token].rank


def tokens(output: RequestOutput) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in output.outputs]


def scores(output: RequestOutput) -> list[dict]:
    """Log probabilities of every position that has some."""
    of_prompt = [entry for entry in output.prompt_logprobs or () if entry is not None]
    return [*of_prompt, *(entry for c in output.outputs for entry in c.logprobs or ())]
