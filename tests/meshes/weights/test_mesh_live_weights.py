"""Weights from a trainer's mesh to an engine's, and hidden states pooled over a mesh."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from exhaustive import combination
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_engines import load, on_mesh, write_llama
from tiny_engines import CONTEXT, TinyModel

from jaxserve.core.requests.pooling import PoolingParams
from jaxserve.core.requests.sampling_params import SamplingParams

pytestmark = pytest.mark.meshes

UNEVEN = {"num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 256}
"""Heads that the mesh must pad, and layers that a pipeline stacks."""
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("mesh", ["TP2 PP2", combination("TP2 CP2")])
def test_weights_change_meshes(tmp_path, mesh):
    path = write_llama(tmp_path / "model", **UNEVEN)
    on_mesh(mesh, check_live_weights, path)


def check_live_weights(mesh: str, path: Path) -> None:
    model = TinyModel.open(path)
    trained = dataclasses.replace(model, params=jax.tree.map(changed, model.params))
    with load(model, mesh) as llm:
        state = llm.engine._runner._state
        shapes = jax.tree.map(lambda array: (array.shape, array.sharding), state.params)
        llm.update_weights(jax.tree.map(scattered, trained.params))
        replaced = jax.tree.map(lambda array: (array.shape, array.sharding), state.params)
        assert replaced == shapes
        check(llm, trained)
        llm.sleep()
        assert not [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array) and x.ndim > 3]
        llm.wake_up()
        check(llm, trained)
        llm.sleep(2)
        llm.update_weights(model.params)
        llm.wake_up()
        check(llm, model)


def changed(x: jax.Array) -> jax.Array:
    return x + 0.1 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)


def scattered(x: jax.Array) -> jax.Array:
    """On a mesh of one axis, split where it divides a dimension."""
    count = jax.device_count()
    spec = [None] * x.ndim
    if divided := [axis for axis, size in enumerate(x.shape) if size % count == 0]:
        spec[divided[-1]] = "data"
    mesh = jax.sharding.Mesh(np.array(jax.devices()[::-1]), ("data",))
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def check(llm, model: TinyModel) -> None:
    """Tokens and embeddings are those of the model."""
    prompts = model.prompts[3::3]
    for output in llm.generate(prompts, GREEDY, use_tqdm=False):
        model.check_greedy(output)
    for pooling in ("last", "mean"):
        params = PoolingParams(pooling=pooling, normalize=False)
        for prompt, output in zip(prompts, llm.embed(prompts, pooling_params=params)):
            hidden = hidden_states(model, prompt)
            pooled = hidden[-1] if pooling == "last" else hidden.mean(axis=0)
            np.testing.assert_allclose(output.outputs.embedding, pooled, rtol=1e-3, atol=1e-3)


def hidden_states(model: TinyModel, prompt: list[int]) -> np.ndarray:
    attention = oracle.dense_attention(model.config)
    padded = np.zeros(CONTEXT, np.int32)
    padded[: len(prompt)] = prompt
    positions = jnp.arange(CONTEXT)
    hidden = model.family.forward(model.params, model.config, padded, positions, attention)
    return np.asarray(hidden)[: len(prompt)]
