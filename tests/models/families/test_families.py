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

from jaxserve.core.errors import WeightsError
from jaxserve.core.model_config import ClampedSwiGLU, ExpertGroups, MoEConfig, RopeConfig
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.params import load_params
from jaxserve.models.registry import ARCHITECTURES, get_family

GOLDEN = Path(__file__).parents[1] / "golden"


@functools.cache
def golden_members():
    return json.loads((GOLDEN / "families.json").read_text(encoding="utf-8"))["members"]


@functools.cache
def golden_logits():
    return dict(np.load(GOLDEN / "families.npz"))


def our_logits(directory, member, raw_config, shapes, seed=0):
    """Logits by way of a checkpoint on disk, as a user would load it."""
    return logits_of(write_hf(directory, raw_config, family_members.tensors(shapes, seed)), member)


def logits_of(path, member, **changes):
    checkpoint = open_checkpoint(path)
    config, family = checkpoint.config, get_family(checkpoint.config.architecture)
    params = load_params(checkpoint, family.param_specs(checkpoint.config), dtype="float32")
    if member.context:
        changes["max_position_embeddings"] = member.context
    config = dataclasses.replace(config, **changes)
    return dense_logits(family, params, config, family_members.token_ids())


def assert_close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=5e-5 * np.abs(theirs).max())


def test_every_architecture_has_a_member():
    members = {f"{member.family}ForCausalLM" for member in MEMBERS.values()}
    assert members | {"Gemma3ForConditionalGeneration"} == set(ARCHITECTURES)
    assert golden_members().keys() == golden_logits().keys() == MEMBERS.keys()


@pytest.mark.parametrize("name", MEMBERS)
def test_logits_equal_golden(tmp_path, name):
    golden = golden_members()[name]
    ours = our_logits(tmp_path, MEMBERS[name], golden["config"], golden["shapes"])
    assert_close(ours, golden_logits()[name])


def test_a_text_model_beside_a_vision_tower(tmp_path):
    """Gemma 3 of 4B and more: a config within the config, tensors below `language_model`."""
    golden = golden_members()["gemma3"]
    raw_config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 63],
        "text_config": golden["config"],
        "vision_config": {"hidden_size": 8},
    }
    tensors = family_members.tensors(golden["shapes"])
    files = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    files["language_model.lm_head.weight"] = tensors["model.embed_tokens.weight"]
    files |= dict.fromkeys(
        ("vision_tower.embeddings.weight", "multi_modal_projector.norm.weight"), np.zeros(8)
    )
    path = write_hf(tmp_path, raw_config, files)
    assert open_checkpoint(path).config.eos_token_ids == (1, 63)
    assert_close(logits_of(path, MEMBERS["gemma3"]), golden_logits()["gemma3"])
    write_hf(tmp_path, raw_config, files | {"audio_tower.weight": np.zeros(8)})
    with pytest.raises(WeightsError, match=r"audio_tower\.weight is not used by the model"):
        open_checkpoint(path)


@pytest.mark.peers
def test_a_model_that_sees_answers_text_as_in_transformers(tmp_path):
    """Its files as transformers writes them, vision tower and all. transformers leaves out the cap
    of its logits, which no published model has."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision = sizes | {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    text = golden_members()["gemma3"]["config"] | {"final_logit_softcapping": None}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=63
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    config.architectures = ["Gemma3ForConditionalGeneration"]
    model.save_pretrained(tmp_path)
    tokens = torch.from_numpy(family_members.token_ids() % 63)[None]
    with torch.no_grad():
        theirs = model(tokens, token_type_ids=torch.zeros_like(tokens)).logits[0].numpy()
    checkpoint = open_checkpoint(tmp_path)
    family = get_family(checkpoint.config.architecture)
    params = load_params(checkpoint, family.param_specs(checkpoint.config), dtype="float32")
    assert_close(dense_logits(family, params, checkpoint.config, tokens[0].numpy()), theirs)


def test_members_differ():
    """Each option a member has changes its logits, so equality above means it was honoured."""
    logits = golden_logits()
    scaled = [name for name in logits if name.startswith("rope_")] + ["llama3", "qwen3", "olmo2"]
    for name in scaled:
        for other in set(scaled) - {name}:
            assert np.abs(logits[name] - logits[other]).max() > 0.1


_DEEPSEEK_V2 = MoEConfig(8, 3, 24, (False, True, True), 48, shared_gate=False, routed_scale=1.7)
_DEEPSEEK_V3 = dataclasses.replace(
    _DEEPSEEK_V2,
    norm_topk_prob=True,
    scores="sigmoid",
    corrected=True,
    groups=ExpertGroups(4, 2, best=2),
)
_GPT_OSS = MoEConfig(6, 3, 80, (True,) * 3, norm_topk_prob=True, biased=True)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("deepseek_v2_groups", {"moe": dataclasses.replace(_DEEPSEEK_V2, groups=None)}),
        ("deepseek_v3", {"moe": dataclasses.replace(_DEEPSEEK_V3, groups=None)}),
        ("deepseek_v3", {"moe": dataclasses.replace(_DEEPSEEK_V3, corrected=False)}),
        ("deepseek_v3", {"moe": dataclasses.replace(_DEEPSEEK_V3, routed_scale=1.0)}),
        ("deepseek_v3", {"query_pre_attn_scalar": 20.0}),
        ("gemma2", {"attention_soft_cap": None}),
        ("gemma2", {"logit_soft_cap": None}),
        ("gemma2", {"query_pre_attn_scalar": None}),
        ("gemma2", {"sliding_windows": (None, None)}),
        ("gemma3", {"window_rope": None}),
        ("gpt_oss", {"sliding_windows": (None,) * 3}),
        ("gpt_oss", {"rope": RopeConfig(theta=1000.0, rotary_dim=32)}),
        ("gpt_oss", {"moe": _GPT_OSS}),
        ("gpt_oss", {"moe": dataclasses.replace(_GPT_OSS, clamped=ClampedSwiGLU(1.3, 7))}),
        (
            "gpt_oss",
            {"moe": dataclasses.replace(_GPT_OSS, clamped=ClampedSwiGLU(1.7, 0.8))},
        ),
        ("olmoe", {"clip_qkv": None}),
        ("qwen2_moe", {"moe": MoEConfig(6, 3, 24, (False, True), 40, norm_topk_prob=False)}),
        ("qwen2_moe", {"moe": MoEConfig(6, 3, 24, (False, True), 0, norm_topk_prob=True)}),
    ],
)
def test_without_an_option_logits_are_others(tmp_path, name, change):
    golden = golden_members()[name]
    path = write_hf(tmp_path, golden["config"], family_members.tensors(golden["shapes"]))
    assert np.abs(logits_of(path, MEMBERS[name], **change) - golden_logits()[name]).max() > 0.1


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
