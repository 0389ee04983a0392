"""Decodes that read shared pages together: the same tokens, and how many bytes they read."""

from __future__ import annotations

import dataclasses

import pytest
from exhaustive import exhaustive
from kv_engines import count
from tiny_engines import CONTEXT, LONGEST, PAGE_SIZE, Arrival, TinyModel, drive

from jaxserve.core.errors import ConfigError
from jaxserve.core.events import Dispatched
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig
from jaxserve.llm import LLM

GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
SEEDED = dataclasses.replace(GREEDY, temperature=0.9, seed=5, n=6)
MAX_SEQS = 8
"""Groups of fewer than six would not pay with prompts of 100 tokens."""


def load(model: TinyModel, **changes) -> LLM:
    """A pool with room for all sequences; freed pages are poisoned."""
    pool = (MAX_SEQS * CONTEXT // PAGE_SIZE + 1) * PAGE_SIZE * model.token_bytes
    width = 4 if "speculative_config" in changes else 1
    sizes = {"max_num_seqs": MAX_SEQS, "max_num_batched_tokens": width * MAX_SEQS + 32}
    return model.load(kv_cache_memory_bytes=pool, debug_kv=True, **sizes, **changes)


def requests(model: TinyModel) -> list[Arrival]:
    """Samples of one prompt, and prompts that share most of it, some of which come later."""
    long = model.prompts[-1]
    several = [[*long[:-4], *model.prompts[3][:tail]] for tail in range(1, 4)]
    return [
        Arrival(long, SEEDED),
        *(Arrival(prompt, GREEDY, 3 * step) for step, prompt in enumerate(several)),
        Arrival(model.prompts[4], GREEDY, 6),
    ]


def tokens(outputs) -> list:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def test_the_same_tokens_greedy_and_seeded(llama):
    found, read = {}, {}
    for setting in ("enabled", "disabled"):
        with load(llama, shared_prefix_attention=setting) as llm:
            if setting == "enabled":
                check_bytes_of_six_samples(llama, llm.engine)
            outputs = drive(llm.engine, requests(llama))
            found[setting] = tokens(outputs)
            read[setting] = count(llm.engine, "prefix_kv_bytes_total", "once")
        for output in outputs[1:]:
            llama.check_greedy(output)
    assert found["enabled"] == found["disabled"]
    assert read["enabled"] > 0 == read["disabled"]


def check_bytes_of_six_samples(model, engine):
    """They share the 100 tokens of the prompt, the last page once it is known to be equal."""
    seen: list[Dispatched] = []
    engine.log._sinks = (*engine.log._sinks, seen.append)
    drive(engine, [Arrival(model.prompts[-1], SEEDED)])
    steps = [record for record in seen if isinstance(record, Dispatched)]
    together = [step for step in steps if step.decode_rows == 6]
    page_bytes = PAGE_SIZE * model.token_bytes
    shared = len(model.prompts[-1]) // PAGE_SIZE * page_bytes
    assert len(together) > LONGEST // 2
    assert {step.prefix_kv_bytes for step in together} <= {shared - page_bytes, shared}
    assert together[-1].prefix_kv_bytes == shared
    for step in together:
        assert step.prefix_kv_bytes_alone == 6 * step.prefix_kv_bytes
    for label, attribute in (("once", "prefix_kv_bytes"), ("alone", "prefix_kv_bytes_alone")):
        total = sum(getattr(step, attribute) for step in steps)
        assert count(engine, "prefix_kv_bytes_total", label) == total


@exhaustive
def test_the_oracles_tokens_with_drafts_and_quantized_kv(llama):
    model = llama.with_kv("int8")
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    with load(model, shared_prefix_attention="enabled", speculative_config=drafts) as llm:
        greedy = dataclasses.replace(GREEDY, n=6)
        prompts = [model.prompts[-1], [*model.prompts[-1][:90], 7]]
        for output in drive(llm.engine, [Arrival(prompt, greedy) for prompt in prompts]):
            model.check_greedy(output)
        assert count(llm.engine, "prefix_kv_bytes_total", "once") > 0


def test_batch_invariance_leaves_it_out(llama):
    model = llama.config

    def chosen(platform, **settings):
        return EngineConfig(**settings).resolve(model, platform).shared_prefix_attention

    assert (chosen("cpu"), chosen("gpu"), chosen("tpu")) == ("enabled", "disabled", "disabled")
    assert chosen("gpu", shared_prefix_attention="enabled") == "enabled"
    assert chosen("cpu", batch_invariant=True) == "disabled"
    for other in ({"batch_invariant": True}, {"context_parallel_size": 2}):
        with pytest.raises(ConfigError, match=f"is 'enabled', but {next(iter(other))} is"):
            EngineConfig(shared_prefix_attention="enabled", **other)
