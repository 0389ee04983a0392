"""Embeddings: equal to a dense forward pass in any company, and the steps that compute them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from tiny_engines import CONTEXT, LONGEST, PROMPT_LENGTHS, Arrival, assert_idle, drive, preemptions

from jaxserve.core.errors import RequestError
from jaxserve.core.requests.pooling import PoolingParams
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.scheduler.policies import POLICIES

LAST = PoolingParams(normalize=False)
MEAN = PoolingParams(pooling="mean", normalize=False)
GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def hidden_of(llama):
    """The oracle's final hidden states of token ids, float32 [tokens, hidden]."""

    @jax.jit
    def forward(params, token_ids):
        positions = jnp.arange(CONTEXT)
        attention = oracle.dense_attention(llama.config)
        return llama.family.forward(params, llama.config, token_ids, positions, attention)

    def hidden(token_ids, params=llama.params):
        padded = np.zeros(CONTEXT, np.int32)
        padded[: len(token_ids)] = token_ids
        return np.asarray(forward(params, padded))[: len(token_ids)]

    return hidden


def checked(arrivals, outputs, hidden_of):
    """How many of these were embedded, each as the oracle does."""
    count = 0
    for arrival, output in zip(arrivals, outputs):
        if isinstance(arrival.params, PoolingParams):
            hidden = hidden_of(arrival.prompt)
            pooled = hidden[-1] if arrival.params is LAST else hidden.mean(axis=0)
            np.testing.assert_allclose(output.embedding, pooled, **CLOSE)
            (choice,) = output.outputs
            assert (choice.token_ids, choice.finish_reason) == ((), "stop")
            count += 1
    return count


@pytest.mark.parametrize("scheduler", POLICIES)
def test_embeddings_in_a_batch_with_generations(llama, llm_for, hidden_of, scheduler):
    """In a pool too tight for all, so that some are preempted and begin again."""
    llm = llm_for(scheduler)
    llm.reset_prefix_cache()
    before = preemptions(llm.engine)
    arrivals = [
        Arrival(prompt, params, step)
        for step, prompt in enumerate(llama.prompts)
        for params in (MEAN, GREEDY, LAST)
    ]
    outputs = drive(llm.engine, arrivals)
    assert checked(arrivals, outputs, hidden_of) == 2 * len(PROMPT_LENGTHS)
    for arrival, output in zip(arrivals, outputs):
        if arrival.params is GREEDY:
            llama.check_greedy(output)
    if scheduler != "medha":  # Its chunks follow measured times.
        reserves = POLICIES[scheduler].pages == "reserve"
        assert (preemptions(llm.engine) > before) != reserves, "nothing was preempted"


def test_nothing_is_compiled_and_no_token_is_counted(llama, llm, compiled):
    def counted():
        return llm.get_metrics()["vllm:generation_tokens_total"].value

    before = counted()
    compiled.clear()
    llm.embed(llama.prompts, pooling_params=[LAST, MEAN] * 6, use_tqdm=False)
    assert compiled == [] and counted() == before


def test_a_cached_prefix_is_computed_once_where_only_the_end_is_pooled(llama, llm, hidden_of):
    prompt = llama.prompts[-1]
    llm.reset_prefix_cache()
    for params, cached in ((MEAN, 0), (LAST, len(prompt) - 1), (MEAN, 0)):
        (output,) = llm.embed(prompt, pooling_params=params, use_tqdm=False)
        assert output.metrics.cached_tokens == cached
        hidden = hidden_of(prompt)
        pooled = hidden[-1] if params is LAST else hidden.mean(axis=0)
        np.testing.assert_allclose(output.outputs.embedding, pooled, **CLOSE)


def test_embeddings_are_normalised_after_dimensions_are_cut(llama, llm, hidden_of):
    prompt = llama.prompts[5]
    (output,) = llm.embed(prompt, pooling_params=PoolingParams(dimensions=7), use_tqdm=False)
    cut = hidden_of(prompt)[-1][:7]
    np.testing.assert_allclose(output.outputs.embedding, cut / np.linalg.norm(cut), **CLOSE)
    (whole,) = llm.embed(prompt, use_tqdm=False)
    assert math.isclose(np.linalg.norm(whole.outputs.embedding), 1, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pooling": "max"}, "pooling is 'max'; it must be 'last' or 'mean'"),
        ({"dimensions": 0}, "dimensions must be an integer of 1 or more"),
        ({"dimensions": 65}, "dimensions is 65; embeddings of this model have 64"),
        ({"normalize": 1}, "normalize must be True or False"),
    ],
)
def test_bad_parameters(llm, fields, message):
    with pytest.raises(RequestError, match=message):
        llm.embed([5, 6], pooling_params=PoolingParams(**fields), use_tqdm=False)


def test_a_prompt_that_fails_fails_alone(llm):
    with pytest.warns(UserWarning, match="1 of 2 prompts failed"):
        good, bad = llm.embed([[5, 6], [5, 1000]], use_tqdm=False)
    assert good.error is None and len(good.outputs.embedding) == 64
    assert bad.outputs.embedding == [] and "1000" in bad.error
    with pytest.raises(RequestError, match="it must be a PoolingParams"):
        llm.embed([5, 6], pooling_params=GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="pooling_params has 2 entries for 1 prompts"):
        llm.embed([[5, 6]], pooling_params=[PoolingParams()] * 2, use_tqdm=False)


def test_scores_are_cosine_similarities(llama, llm, hidden_of):
    texts = ["a cat", "a dog", "the sea"]
    vectors = [hidden_of(llm.get_tokenizer().encode(text))[-1] for text in texts]
    expected = [
        float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
        for a, b in ((vectors[0], vectors[1]), (vectors[0], vectors[2]))
    ]
    scores = llm.score(texts[0], texts[1:], use_tqdm=False)
    np.testing.assert_allclose([each.outputs.score for each in scores], expected, **CLOSE)
    (same,) = llm.score(["a cat"], ["a cat"], use_tqdm=False)
    assert math.isclose(same.outputs.score, 1, rel_tol=1e-6)
    with pytest.raises(RequestError, match="text_1 has 2 texts and text_2 3"):
        llm.score(texts[:2], texts, use_tqdm=False)


def test_an_embedding_in_flight_is_of_one_version_of_the_weights(llama, hidden_of, tmp_path):
    doubled = jax.tree.map(lambda x: 1.3 * x, llama.params)
    with llama.load(trace_file=tmp_path / "trace.json") as llm:
        engine = llm.engine
        request = engine.add("mean", llama.prompts[-1], MEAN)
        for _ in range(2):
            engine.step()  # Two of its four chunks.
        llm.update_weights(doubled)
        while not request.finished:
            engine.step()
        hidden = hidden_of(llama.prompts[-1], doubled)
        np.testing.assert_allclose(request.embedding, hidden.mean(axis=0), **CLOSE)
        # Hidden states that are no numbers are an error of that request.
        broken = dict(doubled, final_norm=jnp.full_like(doubled["final_norm"], jnp.nan))
        llm.update_weights(broken)
        output = drive(engine, [Arrival([5, 6, 7], LAST)])[0]
        assert output.embedding is None and "not finite" in output.error
        llm.sleep()
        llm.wake_up()
        assert_idle(engine)
    assert "prefill" in (tmp_path / "trace.json").read_text()


def test_an_embedding_goes_on_in_another_engine(llama, llm, hidden_of):
    with llama.load() as source:
        request = source.engine.add("moved", llama.prompts[-1], MEAN)
        source.engine.step()
        stream = llm.import_request(list(source.engine.migration.export_request("moved")))
        assert not request.finished
    result = stream.result()
    np.testing.assert_allclose(result.embedding, hidden_of(llama.prompts[-1]).mean(axis=0), **CLOSE)


@pytest.mark.peers
def test_the_hidden_states_are_those_of_transformers(llama, llm):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peer = transformers.LlamaModel.from_pretrained(llama.path, dtype=torch.float32).eval()
    for params in (LAST, MEAN):
        found = llm.embed(llama.prompts, pooling_params=params, use_tqdm=False)
        for prompt, output in zip(llama.prompts, found):
            with torch.no_grad():
                hidden = peer(torch.tensor([prompt])).last_hidden_state[0].numpy()
            pooled = hidden[-1] if params is LAST else hidden.mean(axis=0)
            np.testing.assert_allclose(output.outputs.embedding, pooled, **CLOSE)
