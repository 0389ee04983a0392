"""A family that lives outside of jaxserve, and checkpoints in the layout of their training."""

from __future__ import annotations

import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tiny_checkpoints import CONFIG, random_tensors, write_hf, write_tokenizer

import jaxserve
from jaxserve import LLM, SamplingParams
from jaxserve.core.errors import ConfigError, UnsupportedModelError, WeightsError
from jaxserve.models import registry
from jaxserve.models.families import llama
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.convert import convert
from jaxserve.models.loading.params import load_params
from jaxserve.models.registry import get_family, param_specs

OWN_CONFIG = CONFIG | {"architectures": ["OwnForCausalLM"]}


@pytest.fixture(autouse=True)
def own_family(monkeypatch):
    """A Llama under a name that jaxserve does not know, until the test is over."""
    monkeypatch.setattr(registry, "_registered", {})
    jaxserve.register_family("OwnForCausalLM", llama.FAMILY)


def write_trained(directory, tensors):
    """A directory as a training loop would leave it: tensors in a tree of their own by Orbax."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(OWN_CONFIG))
    write_tokenizer(directory)
    tree = {}
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        place = tree
        for key in path:
            place = place.setdefault(key, {})
        place[last] = tensor
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "params", tree)
    return directory


@pytest.fixture
def trained(tmp_path):
    return write_trained(tmp_path / "trained", random_tensors(CONFIG))


def load(path):
    checkpoint = open_checkpoint(path)
    return load_params(checkpoint, param_specs(checkpoint.config), dtype="float32")


def test_our_own_architectures_cannot_be_replaced():
    with pytest.raises(ConfigError, match="'LlamaForCausalLM' is built into jaxserve"):
        jaxserve.register_family("LlamaForCausalLM", llama.FAMILY)


def test_unknown_architectures_are_refused_with_the_registered_ones_named():
    assert get_family("OwnForCausalLM") is llama.FAMILY
    with pytest.raises(UnsupportedModelError, match="OwnForCausalLM"):
        get_family("OtherForCausalLM")


def test_tensors_by_their_paths_are_the_same_parameters(trained, tmp_path):
    expected = load(write_hf(tmp_path / "hf", CONFIG, random_tensors(CONFIG)))
    assert open_checkpoint(trained).format == "orbax"
    jax.tree.map(np.testing.assert_array_equal, load(trained), expected)


def test_what_was_converted_is_laid_out_as_the_family_has_it(trained, tmp_path):
    converted = convert(trained, tmp_path / "converted")
    jax.tree.map(np.testing.assert_array_equal, load(converted), load(trained))
    checkpoint = open_checkpoint(converted)
    assert checkpoint.stored.keys() == param_specs(checkpoint.config).keys()


def test_tensors_that_are_missing_or_too_many_are_named(tmp_path):
    tensors = random_tensors(CONFIG)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    tensors["optimizer.count"] = np.zeros(1, np.float32)
    with pytest.raises(WeightsError) as raised:
        open_checkpoint(write_trained(tmp_path / "broken", tensors))
    assert "model.layers.1.mlp.down_proj.weight is missing" in str(raised.value)
    assert "optimizer.count is not used by the model" in str(raised.value)


def test_an_engine_serves_it_and_keeps_no_programs(trained, tmp_path, session_cache):
    """The cache would not notice a change of the family's code."""
    hf = write_hf(tmp_path / "hf", CONFIG, random_tensors(CONFIG))
    settings = {"max_num_seqs": 1, "max_num_batched_tokens": 17, "page_size": 16}
    params, prompt = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), [1, 2, 3]
    outputs = []
    for path, cached in ((hf, True), (trained, False)):
        with LLM(path, **settings) as llm:
            assert (llm.plan().cache is not None) == cached
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            outputs.append(output.outputs[0].token_ids)
    assert outputs[0] == outputs[1]
