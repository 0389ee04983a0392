"""The embedded model against transformers reading the same file."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from oracle import dense_logits

from jaxserve.models.loading.assemble import assemble
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.params import load_params
from jaxserve.models.registry import ARCHITECTURES, get_family, param_specs

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fields_that_transformers_writes_are_known(architecture):
    """Those of its config classes, with the values that they have by default."""
    transformers = pytest.importorskip("transformers")
    fields = getattr(transformers, architecture).config_class().to_dict()
    if fields.get("num_experts_per_tok", 0) is None:  # of DeepSeek V2, which needs one
        fields["num_experts_per_tok"] = 4
    config = get_family(architecture).config_from_hf(fields | {"architectures": [architecture]})
    assert config.num_layers == (fields.get("text_config") or fields)["num_hidden_layers"]


@pytest.fixture(scope="module")
def theirs():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = open_checkpoint().path
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return model.eval()


def test_dequantised_weights_are_equal(theirs):
    checkpoint = open_checkpoint()
    specs = param_specs(checkpoint.config)
    parameters = dict(theirs.named_parameters())
    for spec in jax.tree.leaves(specs):
        everything = tuple(slice(0, size) for size in spec.shape)
        ours = assemble(checkpoint, spec, everything, np.dtype(np.float32))
        pieces = [
            parameters.pop(part.tensor).detach().numpy().reshape(part.shape) for part in spec.parts
        ]
        np.testing.assert_array_equal(ours, np.concatenate(pieces, axis=spec.concat_axis))
    assert not parameters


def test_logits_are_equal(theirs):
    import torch

    checkpoint = open_checkpoint()
    family = get_family(checkpoint.config.architecture)
    params = load_params(checkpoint, family.param_specs(checkpoint.config), dtype="float32")
    token_ids = checkpoint.tokenizer().encode(
        "The sky is blue because of Rayleigh scattering. " * 6
    )
    ours = dense_logits(family, params, checkpoint.config, token_ids)
    with torch.no_grad():
        expected = theirs(torch.tensor([token_ids])).logits[0].numpy()
    np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
