"""SmolLM2's weights replaced, put to sleep and back, and its embeddings beside transformers'."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from golden_prompts import golden_prompts
from real_engines import GREEDY
from tiny_engines import generate

from jaxserve.core.requests.pooling import PoolingParams

pytestmark = pytest.mark.real_model

PROMPT = "The capital of France is"


def test_weights_are_replaced_and_sleep(llm, smollm2):
    before = generate(llm, PROMPT, GREEDY).outputs[0]
    held = jax.tree.leaves(llm.engine._runner._state.params)
    llm.update_weights(jax.tree.map(lambda x: 0.5 * x, smollm2.params))
    assert all(array.is_deleted() for array in held)
    assert generate(llm, PROMPT, GREEDY).outputs[0].token_ids != before.token_ids
    llm.sleep(2)
    llm.update_weights(smollm2.path)
    llm.wake_up()
    after = generate(llm, PROMPT, GREEDY).outputs[0]
    assert after.token_ids == before.token_ids
    assert [run.version for run in after.weights] == [llm.engine.weights_version]


@pytest.mark.peers
def test_embeddings_are_those_of_transformers(llm, smollm2_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peer = transformers.AutoModel.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    ).eval()
    prompts = [entry.prompt_token_ids for entry in golden_prompts()[:3]]
    for pooling in ("last", "mean"):
        params = PoolingParams(pooling=pooling)
        for prompt, output in zip(prompts, llm.embed(prompts, pooling_params=params)):
            with torch.no_grad():
                hidden = peer(torch.tensor([prompt])).last_hidden_state[0].numpy()
            pooled = hidden[-1] if pooling == "last" else hidden.mean(axis=0)
            pooled /= np.linalg.norm(pooled)
            np.testing.assert_allclose(output.outputs.embedding, pooled, atol=1e-3)
