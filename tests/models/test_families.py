"""Every member of every family computes what transformers computes."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import family_members
import numpy as np
import pytest
from family_members import MEMBERS
from oracle import dense_logits, greedy, tiny_model
from tiny_checkpoints import write_hf

from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.params import load_params
from jaxserve.models.registry import ARCHITECTURES, get_family

GOLDEN = Path(__file__).parent / "golden"


@functools.cache
def golden_members():
    return json.loads((GOLDEN / "families.json").read_text(encoding="utf-8"))["members"]


@functools.cache
def golden_logits():
    return dict(np.load(GOLDEN / "families.npz"))


def our_logits(directory, member, raw_config, shapes, seed=0):
    """Logits by way of a checkpoint on disk, as a user would load it."""
    path = write_hf(directory, raw_config, family_members.tensors(shapes, seed))
    checkpoint = open_checkpoint(path)
    config, family = checkpoint.config, get_family(checkpoint.config.architecture)
    params = load_params(checkpoint, family.param_specs(checkpoint.config), dtype="float32")
    if member.context:
        config = dataclasses.replace(config, max_position_embeddings=member.context)
    return dense_logits(family, params, config, family_members.token_ids())


def assert_close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=5e-5 * np.abs(theirs).max())


def test_every_architecture_has_a_member():
    assert {f"{member.family}ForCausalLM" for member in MEMBERS.values()} == set(ARCHITECTURES)
    assert golden_members().keys() == golden_logits().keys() == MEMBERS.keys()


@pytest.mark.parametrize("name", MEMBERS)
def test_logits_equal_golden(tmp_path, name):
    golden = golden_members()[name]
    ours = our_logits(tmp_path, MEMBERS[name], golden["config"], golden["shapes"])
    assert_close(ours, golden_logits()[name])


def test_members_differ():
    """Each option a member has changes its logits, so equality above means it was honoured."""
    logits = golden_logits()
    scaled = [name for name in logits if name.startswith("rope_")] + ["llama3", "qwen3", "olmo2"]
    for name in scaled:
        for other in set(scaled) - {name}:
            assert np.abs(logits[name] - logits[other]).max() > 0.1


@pytest.mark.peers
@pytest.mark.parametrize("name", MEMBERS)
def test_logits_equal_transformers(tmp_path, name):
    """The same comparison live, with other weights than the golden file's."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    model = family_members.hf_model(MEMBERS[name], seed=1)
    raw_config = family_members.hf_config(model, tmp_path)
    shapes = family_members.hf_shapes(model)
    ours = our_logits(tmp_path, MEMBERS[name], raw_config, shapes, seed=1)
    assert_close(ours, family_members.hf_logits(model))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_follows_the_dense_logits(architecture):
    """What the oracle continues with is the best token of the pass over the whole sequence."""
    family, config, params = tiny_model(architecture, tie_word_embeddings=False)
    prompt = [5, 17, 99, 3]
    continuation = greedy(family, params, config, prompt, max_tokens=40)
    logits = dense_logits(family, params, config, prompt + continuation)
    assert logits[len(prompt) - 1 : -1].argmax(axis=1).tolist() == continuation
    assert len(set(continuation)) > 4
    stop = continuation[6]
    stopped = greedy(family, params, config, prompt, max_tokens=40, eos=[stop])
    assert stopped == continuation[: continuation.index(stop) + 1]


def test_a_window_hides_older_tokens():
    family, config, params = tiny_model("MistralForCausalLM", sliding_window=4)
    first = dense_logits(family, params, config, [1, *range(20, 40)])
    second = dense_logits(family, params, config, [2, *range(20, 40)])
    # Two layers of four tokens each see back over positions 0 to 6.
    assert np.abs(first[:7] - second[:7]).max(axis=1).min() > 1e-3
    np.testing.assert_array_equal(first[7:], second[7:])
