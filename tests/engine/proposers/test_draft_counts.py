"""How many steps drafts save: as many as their acceptance says, and never fewer than none."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive import combination
from tiny_engines import LONGEST, Arrival, drive

from jaxserve.core.events import Collected
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.speculative import METHODS
from jaxserve.models.drafters.medusa import MedusaConfig
from jaxserve.models.loading.drafters.medusa import save_heads
from jaxserve.runtime.proposers import PROPOSERS

DRAFTS = 3
ROWS = {"max_num_seqs": 2, "max_num_batched_tokens": 2 * (1 + DRAFTS) + 16}
PLAIN = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)


def equally_likely(logits: jax.Array, count: jax.Array) -> jax.Array:
    """`count` tokens that are, whatever came before them."""
    return jnp.where(jnp.arange(len(logits)) < count, 0.0, -jnp.inf)


@pytest.mark.parametrize("count", [2, combination(4)])
def test_tokens_a_step_are_those_of_the_closed_form(llama, tmp_path, count):
    """Each draft of prompt lookup is one of `count` equally likely tokens, so it is right with
    probability a = 1 / count, and a step with k drafts gives (1 - a^(k+1)) / (1 - a) tokens."""
    drafts = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_min": 1}
    prompt = np.random.RandomState(1).randint(0, count, 20).tolist()
    settings = {"speculative_config": drafts, "logits_processors": [equally_likely]}
    with llama.load(**ROWS, **settings, trace_file=tmp_path / "trace.json") as llm:
        for seed in range(10):
            params = dataclasses.replace(
                PLAIN,
                temperature=1.0,
                seed=seed,
                max_tokens=90,
                extra_args={"equally_likely": count},
            )
            (output,) = llm.generate(prompt, params, use_tqdm=False)
        steps = [each for each in llm.engine.log.records if isinstance(each, Collected)]
        whole = [own for step in steps for own in step.drafts if own.num_tokens == DRAFTS]
        gained = [1 + own.num_accepted for own in whole]
        times = output.metrics
        assert times.num_draft_tokens >= times.num_drafts >= times.num_accepted_tokens / DRAFTS
    a = 1 / count
    probs = np.array([a**n * (1 - a) for n in range(DRAFTS)] + [a**DRAFTS])
    mean = (1 - a ** (DRAFTS + 1)) / (1 - a)
    assert probs @ np.arange(1, DRAFTS + 2) == pytest.approx(mean)
    spread = np.sqrt(probs @ (np.arange(1, DRAFTS + 2) - mean) ** 2 / len(gained))
    assert len(gained) > 200
    assert abs(np.mean(gained) - mean) < 4 * spread


def test_drafts_at_random_take_no_more_steps_than_none(llama, tmp_path):
    """With requests that arrive while others run."""
    config = MedusaConfig(DRAFTS, 1, llama.config.hidden_size, llama.config.vocab_size)
    blocks = np.random.default_rng(6).normal(0, 0.2, (DRAFTS, *[config.hidden_size] * 2))
    save_heads(tmp_path, config, blocks.astype(np.float32))
    drafts = {"method": "medusa", "model": str(tmp_path), "num_speculative_tokens": DRAFTS}
    sampled = dataclasses.replace(PLAIN, temperature=1.0, seed=2)
    counts, answers = [], []
    for config in (None, drafts):
        with llama.load(**ROWS, speculative_config=config) as llm:
            taken = []
            for first in range(3, 9):
                arrivals = [
                    Arrival(llama.prompts[first + place], params, 3 * place)
                    for place, params in enumerate((PLAIN, sampled, PLAIN))
                ]
                before = llm.get_metrics()["jaxserve:steps_total"].value
                answers.append([each.outputs[0].token_ids for each in drive(llm.engine, arrivals)])
                taken.append(llm.get_metrics()["jaxserve:steps_total"].value - before)
            counts.append(taken)
    assert answers[:6] == answers[6:]
    assert all(mine <= none for none, mine in zip(*counts)), counts


def test_each_method_has_a_proposer():
    assert PROPOSERS.keys() == METHODS.keys()
