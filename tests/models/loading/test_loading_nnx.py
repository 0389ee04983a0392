"""Parameters of a Flax NNX model: the same logits in the structure of the engine's own."""

from __future__ import annotations

import dataclasses

import numpy as np
import oracle
import pytest
from flax import nnx
from nnx_llama import NNXLlama

from jaxserve import from_flax
from jaxserve.core.errors import WeightsError

TOKENS = np.random.RandomState(1).randint(0, 128, (1, 32))


def test_an_nnx_llama_and_its_parameters_say_the_same():
    family, config, _ = oracle.tiny_model()
    model = NNXLlama(config, nnx.Rngs(0))
    params = nnx.jit(lambda model: from_flax(model, config))(model)
    expected = nnx.jit(lambda model, tokens: model(tokens))(model, TOKENS)[0]
    found = oracle.dense_logits(family, params, config, TOKENS[0])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_model_of_other_parameters_is_refused():
    _, config, _ = oracle.tiny_model()
    model = NNXLlama(config, nnx.Rngs(0))
    with pytest.raises(WeightsError, match=r"mlp\.down_proj\.weight has shape"):
        from_flax(model, dataclasses.replace(config, intermediate_size=80))
    with pytest.raises(WeightsError, match=r"lm_head\.weight is not a parameter of Llama"):
        from_flax(model, dataclasses.replace(config, tie_word_embeddings=True))
    del model.norm
    with pytest.raises(WeightsError, match=r"norm\.weight is missing in the NNX model"):
        from_flax(model, config)
