"""A directory that is for another method of speculation is refused by name."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from jaxserve.core.errors import ConfigError
from jaxserve.models.drafters import eagle, eagle3
from jaxserve.models.drafters.eagle3 import Eagle3Config
from jaxserve.models.drafters.medusa import MedusaConfig
from jaxserve.models.loading.drafters.eagle import save_layer
from jaxserve.models.loading.drafters.eagle3 import save_layer as save_layer3
from jaxserve.models.loading.drafters.medusa import save_heads
from jaxserve.models.loading.drafters.methods import check_method

HOLDS = {
    "draft_model": "a whole model",
    "medusa": "Medusa heads",
    "eagle": "an EAGLE draft layer",
    "eagle3": "an EAGLE-3 draft layer",
}


@pytest.fixture
def directories(tmp_path, llama):
    """One for each method."""
    layer, own = eagle.layer_for(llama.config), Eagle3Config((0, 1), 101)
    size, vocab = layer.hidden_size, layer.vocab_size

    def zeros(specs):
        return jax.tree.map(lambda spec: np.zeros(spec.shape, np.float32), specs)

    heads = np.zeros((1, size, size), np.float32)
    save_heads(tmp_path / "medusa", MedusaConfig(1, 1, size, vocab), heads)
    save_layer(tmp_path / "eagle", layer, zeros(eagle.param_specs(layer, biased=False)))
    save_layer3(tmp_path / "eagle3", layer, own, zeros(eagle3.param_specs(layer, own)))
    return {"draft_model": llama.path} | {name: tmp_path / name for name in [*HOLDS][1:]}


def test_a_directory_is_for_its_method(directories):
    for method, other in itertools.product(HOLDS, HOLDS):
        if method == other:
            check_method(str(directories[other]), method)
            continue
        with pytest.raises(ConfigError) as refused:
            check_method(str(directories[other]), method)
        assert str(refused.value) == (
            f"the model of speculative_config is {str(directories[other])!r}, which holds "
            f'{HOLDS[other]}, but the method {method!r} needs {HOLDS[method]}; set "method" to '
            f'"{other}", or "model" to {HOLDS[method]}.'
        )


def test_an_engine_refuses_it_first(directories, llama):
    """Before it reads weights; without a method a `model` is a draft model."""
    drafts = {"model": str(directories["eagle"]), "num_speculative_tokens": 2}
    for other in ({}, {"method": "medusa"}):
        with pytest.raises(ConfigError, match=r'an EAGLE draft layer.* set "method" to "eagle"'):
            llama.load(speculative_config=drafts | other)
