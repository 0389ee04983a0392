"""A drafter that computes NaN is switched off with a warning, and the answers are the same."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import jax
import numpy as np
import pytest
from exhaustive import combination
from kv_engines import token_ids
from tiny_checkpoints import CONFIG, random_tensors, write_hf
from tiny_engines import CONTEXT, LONGEST, Arrival, drive, generate

from jaxserve.core.model_config import ModelConfig
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.llm import LLM
from jaxserve.models.drafters import eagle3
from jaxserve.models.drafters.eagle3 import Eagle3Config
from jaxserve.models.drafters.medusa import MedusaConfig
from jaxserve.models.loading.drafters.eagle3 import save_layer
from jaxserve.models.loading.drafters.medusa import save_heads

DRAFTS = 3
FEW_ROWS = {"max_num_seqs": 2, "max_num_batched_tokens": 2 * (1 + DRAFTS) + 16}
GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
SEEDED = dataclasses.replace(GREEDY, temperature=0.9, seed=4)
BROKEN_TOKEN = 200


def counted(llm: LLM, name: str) -> int:
    return int(llm.get_metrics()[f"vllm:spec_decode_num_{name}_total"].value)


def warnings(caplog) -> list[str]:
    records = (record for record in caplog.records if record.levelno >= logging.WARNING)
    return [message for record in records if "NaN" in (message := record.getMessage())]


def write_heads(path: Path, target: ModelConfig) -> None:
    heads = MedusaConfig(DRAFTS, 1, target.hidden_size, target.vocab_size)
    save_heads(path, heads, np.full((DRAFTS, *[heads.hidden_size] * 2), np.nan, np.float32))


def write_layer(path: Path, target: ModelConfig) -> None:
    """That cannot guess 56 of the tokens."""
    config, own = eagle3.layer_for(target), Eagle3Config((0, 1), 200, mapped=False)
    specs = eagle3.param_specs(config, own)
    params = jax.tree.map(lambda spec: np.full(spec.shape, np.nan, np.float32), specs)
    save_layer(path, config, own, params)


@pytest.mark.parametrize(
    ("method", "write"), [("medusa", write_heads), combination("eagle3", write_layer)]
)
def test_broken_weights_switch_it_off_for_all(llama, alone, tmp_path, caplog, method, write):
    write(tmp_path, llama.config)
    config = {"method": method, "model": str(tmp_path), "num_speculative_tokens": DRAFTS}
    with llama.load(speculative_config=config, **FEW_ROWS) as llm:
        widths, runner = set(), llm.engine._runner

        def look() -> None:
            widths.update(step.width for step in runner.in_flight)

        def answered(arrivals: list[Arrival]) -> set[int]:
            """The widths of the steps that answered them."""
            widths.clear()
            for arrival, output in zip(arrivals, drive(llm.engine, arrivals, look)):
                assert token_ids(output) == alone.tokens(arrival.prompt, arrival.params)
            return widths

        params = (GREEDY, SEEDED) * 2
        some = [Arrival(llama.prompts[i], params[i], i) for i in range(4)]
        assert answered(some) == {1, 1 + DRAFTS}
        assert answered([Arrival(llama.prompts[4], GREEDY)]) == {1}
        assert counted(llm, "draft_tokens") == 0
    (message,) = warnings(caplog)
    assert f"({method}) computes NaN; all requests go on without drafts" in message


def test_one_request_is_not_drafted_for(llama, alone, tmp_path, caplog):
    """The draft model computes NaN after one token, which only some prompts have."""
    raw = CONFIG | {"num_hidden_layers": 1, "max_position_embeddings": CONTEXT}
    tensors = random_tensors(raw)
    tensors["model.embed_tokens.weight"][BROKEN_TOKEN] = np.nan
    path = write_hf(tmp_path / "model", raw, tensors)
    config = {"model": str(path), "num_speculative_tokens": DRAFTS}
    broken = [*llama.prompts[3][:2], BROKEN_TOKEN, *llama.prompts[3][2:]]
    with llama.load(speculative_config=config, **FEW_ROWS) as llm:
        for prompt in (llama.prompts[4], broken, broken, llama.prompts[5]):
            before = counted(llm, "draft_tokens")
            (answer,) = alone.tokens(prompt, GREEDY)
            assert BROKEN_TOKEN not in answer
            assert token_ids(generate(llm, prompt, GREEDY)) == [answer]
            assert (counted(llm, "draft_tokens") > before) == (prompt is not broken)
    (message,) = warnings(caplog)
    assert "(draft_model) computes NaN; request" in message
