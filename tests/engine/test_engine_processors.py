"""Logits processors of the caller: compiled at the start, applied to the rows that name them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from tiny_engines import LONGEST, Arrival, drive, generate

from jaxserve.core.errors import ConfigError, RequestError
from jaxserve.core.requests.sampling_params import SamplingParams

PROMPT = 9
GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.3, seed=5, max_tokens=LONGEST, ignore_eos=True)


def multiples(logits: jax.Array, divisor: jax.Array) -> jax.Array:
    """Only ids that `divisor` divides, and all of them: even those that were banned."""
    divided = jnp.arange(len(logits)) % divisor.astype(jnp.int32) == 0
    return jnp.where(divided, jnp.nan_to_num(logits, neginf=0.0), -jnp.inf)


def nearest(logits: jax.Array, distance: jax.Array) -> jax.Array:
    """Only tokens whose logits are that near to the largest."""
    return jnp.where(logits >= jnp.max(logits) - distance, logits, -jnp.inf)


@pytest.fixture(scope="module")
def processed(llama):
    """An engine with a processor given by its name, and a function."""
    by_name = "test_engine_processors:multiples"
    with llama.load(logits_processors=[by_name, nearest]) as llm:
        yield llm


def tokens(output):
    return list(output.outputs[0].token_ids)


def with_args(params: SamplingParams, **extra_args: float) -> SamplingParams:
    fields = {name: getattr(params, name) for name in params.__dataclass_fields__}
    return SamplingParams(**fields | {"extra_args": extra_args})


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_a_processor_decides_what_is_sampled(llama, processed, params):
    """As the same rule in allowed_token_ids; and nothing, where all tokens stay."""
    prompt = llama.prompts[PROMPT]
    even = list(range(0, llama.config.vocab_size, 2))
    fields = {name: getattr(params, name) for name in params.__dataclass_fields__}
    allowed = SamplingParams(**fields | {"allowed_token_ids": even})
    wanted = tokens(generate(processed, prompt, allowed))
    assert tokens(generate(processed, prompt, with_args(params, multiples=2))) == wanted
    plain = tokens(generate(processed, prompt, params))
    assert tokens(generate(processed, prompt, with_args(params, nearest=1e9))) == plain != wanted
    best = tokens(generate(processed, prompt, with_args(params, nearest=0)))
    assert best == llama.answer(PROMPT, LONGEST, ignore_eos=True)


def test_each_row_of_a_batch_has_its_own(llama, processed):
    prompt = llama.prompts[PROMPT]
    wanted = [
        *(GREEDY, SEEDED, with_args(SEEDED, multiples=3), with_args(GREEDY, multiples=7)),
        with_args(SEEDED, multiples=2, nearest=4),
    ]
    alone = [tokens(generate(processed, prompt, params)) for params in wanted]
    assert len({tuple(each) for each in alone}) == len(wanted)
    arrivals = [Arrival(prompt, params, step) for step, params in enumerate(wanted)]
    assert [tokens(output) for output in drive(processed.engine, arrivals)] == alone


def test_a_token_that_is_not_allowed_stays_so(llama, processed):
    params = SamplingParams(temperature=1.5, seed=1, max_tokens=8, allowed_token_ids=(6, 9, 11))
    both = with_args(params, multiples=3)
    assert set(tokens(generate(processed, llama.prompts[PROMPT], both))) == {6, 9}


def test_nothing_is_compiled_once_the_engine_is_ready(llama, processed, compiled):
    params = with_args(SEEDED, multiples=2)
    generate(processed, llama.prompts[PROMPT], params)
    jax.clear_caches()
    compiled.clear()
    drive(processed.engine, [Arrival(prompt, params) for prompt in llama.prompts])
    assert compiled == []


def test_a_processor_that_has_changed_is_compiled_again(llama, processed, monkeypatch, tmp_path):
    """The cache of programs looks at what it does, not at its name."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))
    prompt, found = llama.prompts[PROMPT], []
    for offset in (0, 1, 0):

        def shifted(logits, number, offset=offset):
            return jnp.where(jnp.arange(len(logits)) % 2 == offset, logits, -jnp.inf)

        with llama.load(logits_processors=[shifted], max_num_seqs=1) as llm:
            params = SamplingParams(temperature=0, max_tokens=4, extra_args={"shifted": 1})
            found.append(tokens(generate(llm, prompt, params)))
            compiled_now = llm.get_metrics()["jaxserve:programs_compiled_total"].value
    assert {token % 2 for token in found[0]} == {0} and {token % 2 for token in found[1]} == {1}
    assert found[2] == found[0] and compiled_now == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([3], "must be a list of functions"),
        ([multiples, multiples], "each with a name of its own"),
        ([lambda logits, number: logits[:-1]], "returns .*; it must return float32 logits"),
        ([lambda logits, number: logits.astype(int)], "it must return float32 logits"),
        ([lambda logits, number: 1 / 0], "cannot be traced by JAX.*ZeroDivisionError"),
        ([lambda logits: logits], "cannot be traced by JAX"),
        (["nowhere:at_all"], "No module named 'nowhere'.*module:function"),
        (["math:at_all"], "has no attribute 'at_all'"),
    ],
)
def test_what_cannot_be_a_processor_is_refused_at_the_start(llama, given, message):
    with pytest.raises(ConfigError, match=message):
        llama.load(logits_processors=given)


def test_requests_name_processors_that_there_are(llama, processed):
    for extra_args, message in (
        ({"other": 1}, "extra_args names 'other'.*multiples, nearest"),
        ({"nearest": "a"}, "must map names of logits processors to finite numbers"),
        ({"nearest": float("nan")}, "finite numbers"),
        ([1], "must map at most 16 names"),
    ):
        with pytest.raises(RequestError, match=message):
            generate(processed, llama.prompts[0], SamplingParams(extra_args=extra_args))
