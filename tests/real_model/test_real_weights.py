"""SmolLM2's weights replaced, put to sleep and back, and its embeddings beside transformers'."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from exhaustive import combination
from flax import nnx
from golden_prompts import golden_prompts
from nnx_llama import NNXLlama
from real_engines import GREEDY
from tiny_engines import generate

from jaxserve import from_flax
from jaxserve.core.requests.pooling import PoolingParams
from jaxserve.models.registry import param_specs

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
    assert [run.version for run in after.weights] == [llm.engine.weights.version]


@pytest.mark.parametrize("dtype", ["float32", combination("bfloat16")])
def test_an_nnx_smollm2_has_every_parameter_of_the_model(llm, smollm2, dtype):
    """Bit for bit, from kernels [inputs, outputs]; in float32 its answer too, once it is served."""
    params = jax.tree.map(lambda array: array.astype(dtype), smollm2.params)
    model = nnx_model(smollm2.config, params)
    found = from_flax(model, llm.model_config)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    if dtype == "float32":
        before = generate(llm, PROMPT, GREEDY).outputs[0]
        llm.update_weights(found)
        assert generate(llm, PROMPT, GREEDY).outputs[0].token_ids == before.token_ids


def nnx_model(config, params) -> nnx.Module:
    """A Llama in Flax NNX with these parameters, and without a head, as SmolLM2 is."""
    tensors = {}
    for spec, array in zip(
        jax.tree.leaves(param_specs(config)), jax.tree.leaves(params), strict=True
    ):
        sizes = [part.shape[spec.concat_axis] for part in spec.parts]
        pieces = np.split(np.asarray(array), np.cumsum(sizes)[:-1], spec.concat_axis)
        for part, piece in zip(spec.parts, pieces, strict=True):
            inputs = spec.matrix[1] if spec.num_inputs else piece.size
            tensors[part.tensor.removeprefix("model.")] = piece.reshape(-1, inputs)
    model = nnx.eval_shape(lambda: NNXLlama(config, nnx.Rngs(0)))
    del model.lm_head
    graph, state = nnx.split(model, nnx.Param)

    def filled(path, shape):
        *module, kind = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        matrix = tensors[".".join([*module, "weight"])]
        return (matrix.T if kind == "kernel" else matrix).reshape(shape.shape)

    pure = jax.tree_util.tree_map_with_path(filled, nnx.to_pure_dict(state))
    nnx.replace_by_pure_dict(state, pure)
    return nnx.merge(graph, state)


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
