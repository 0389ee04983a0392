"""Speculation with other settings of an engine: schedulers, adapters, quantized weights, rules of
acceptance with lengths that are chosen, and requests that go on in another engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from exhaustive import combination, exhaustive
from kv_engines import Preempter, bytes_of, token_ids
from lora_adapters import merged, write_adapter
from tiny_engines import LONGEST, Arrival, TinyModel, drive

from jaxserve import LoRARequest
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.speculative import AUTO_LENGTHS
from jaxserve.llm import LLM
from jaxserve.models.drafters import eagle
from jaxserve.models.loading.drafters.eagle import save_layer

DRAFTS = 3
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_min": 1}
ROWS = {"max_num_seqs": 2, "max_num_batched_tokens": 2 * (1 + AUTO_LENGTHS[-1]) + 16}
PLAIN = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
FEW = dataclasses.replace(PLAIN, temperature=1.0, seed=3, allowed_token_ids=(97, 98, 99))
PROMPTS = (3, 8, 10)


def counted(llm: LLM, name: str) -> int:
    return int(llm.get_metrics()[f"vllm:spec_decode_num_{name}_total"].value)


def answers(llm: LLM, model: TinyModel, between: Any = lambda: None) -> list[Any]:
    arrivals = [
        Arrival(model.prompts[index], params, step)
        for step, index in enumerate(PROMPTS)
        for params in (PLAIN, FEW)
    ]
    return [token_ids(output) for output in drive(llm.engine, arrivals, between)]


@pytest.fixture(scope="module")
def expected(llama):
    with llama.load(**ROWS) as llm:
        return answers(llm, llama)


@pytest.mark.parametrize("scheduler", [combination("static"), "splitfuse"])
def test_other_schedulers(llama, expected, scheduler):
    with llama.load(**ROWS, scheduler=scheduler, speculative_config=NGRAM) as llm:
        assert answers(llm, llama, Preempter(llm.engine, 3, share=0.2)) == expected
        assert counted(llm, "accepted_tokens") > 0


def test_a_layer_drafts_for_quantized_weights(llama, tmp_path):
    config, rng = eagle.layer_for(llama.config), np.random.default_rng(6)
    params = jax.tree.map(
        lambda spec: rng.normal(0, 0.2, spec.shape).astype(np.float32),
        eagle.param_specs(config, biased=True),
    )
    save_layer(tmp_path, config, params)
    drafts = {"method": "eagle", "model": str(tmp_path), "num_speculative_tokens": DRAFTS}
    found = []
    for config in (None, drafts):
        with llama.load(**ROWS, quantization="int8", speculative_config=config) as llm:
            found.append(answers(llm, llama))
    assert found[0] == found[1]


@exhaustive
def test_an_adapter_with_a_draft_model(llama, tmp_path):
    """The draft model has no adapters: its drafts are those for the model without one."""
    path = write_adapter(tmp_path / "own", llama, rank=8, alpha=16)
    adapted = merged(llama, path, tmp_path / "merged")
    drafts = {"model": str(llama.path), "num_speculative_tokens": DRAFTS}
    adapters = {"enable_lora": True, "max_lora_rank": 8}
    pool = {"kv_cache_memory_bytes": bytes_of(llama, 2 * 41)}  # A page holds both models' layers.
    with llama.load(**ROWS, **pool, **adapters, speculative_config=drafts) as llm:
        for request, model in ((LoRARequest("own", path), adapted), (None, llama)):
            before = [counted(llm, name) for name in ("draft_tokens", "accepted_tokens")]
            prompts = [llama.prompts[index] for index in PROMPTS]
            for output in llm.generate(prompts, PLAIN, lora_request=request, use_tqdm=False):
                model.check_greedy(output)
            drafted, accepted = (
                counted(llm, name) - count
                for name, count in zip(("draft_tokens", "accepted_tokens"), before)
            )
            assert drafted > accepted if request else drafted == accepted > 0


@exhaustive
@pytest.mark.parametrize("acceptance", ["rejection", "typical"])
def test_rules_of_acceptance_with_lengths_that_are_chosen(llama, expected, acceptance):
    """The model drafts for itself."""
    drafts = {"model": str(llama.path), "num_speculative_tokens": "auto", "acceptance": acceptance}
    pool = {"kv_cache_memory_bytes": bytes_of(llama, 2 * 41)}  # A page holds both models' layers.
    with llama.load(**ROWS, **pool, speculative_config=drafts) as llm:
        found = answers(llm, llama)
        assert found[::2] == expected[::2]
        assert all(set(tokens) <= set(FEW.allowed_token_ids) for (tokens,) in found[1::2])
        accepted, drafted = counted(llm, "accepted_tokens"), counted(llm, "draft_tokens")
        assert accepted > 0
        if acceptance == "rejection":
            assert accepted == drafted


def test_a_request_that_goes_on_elsewhere_drafts_as_before(llama, tmp_path):
    """An export and a snapshot take the KV of the drafter along, here the model too, whose drafts
    are all right; also to pages of another size. An engine with another drafter takes the KV of
    the model alone."""
    drafts = {"model": str(llama.path), "num_speculative_tokens": DRAFTS}
    settings = {"kv_cache_memory_bytes": bytes_of(llama, 2 * 41), "speculative_config": drafts}
    expected = [tuple(llama.answer(10, LONGEST, ignore_eos=True))]
    with llama.load(**ROWS, **settings) as llm:
        stream = llm.stream({"prompt_token_ids": llama.prompts[10]}, PLAIN)
        for _ in range(5):
            llm.engine.step()
        parts = list(llm.export_request(stream.request_id))
        llm.snapshot(tmp_path)
        stayed = stream.result()
    with llama.load(**ROWS, **settings, page_size=8) as llm:
        moved = llm.import_request(iter(parts)).result()
        llm.reset_prefix_cache()
        (stream,) = llm.restore(tmp_path)
        restored = stream.result()
    for output in (stayed, moved, restored):
        assert token_ids(output) == expected
        assert output.metrics.num_accepted_tokens == output.metrics.num_draft_tokens > 0
    with llama.load(**ROWS, speculative_config=NGRAM) as llm:
        assert token_ids(llm.import_request(iter(parts)).result()) == expected
