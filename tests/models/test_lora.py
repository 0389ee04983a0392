"""Adapters of dense families against merged weights, and adapters that must be refused."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from lora_adapters import LLAMA, merged, write_adapter, write_peft
from safetensors.numpy import load_file
from tiny_engines import TinyModel

from jaxserve.core.errors import AdapterError
from jaxserve.models.loading.adapter import read_adapter
from jaxserve.models.lora import adapted, adapter_specs, of_one

RANK = 6
"""Above that of the adapters, which are padded to it."""
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
SHAPES: dict[str, tuple[str, ...]] = {
    "qwen2": LLAMA,
    "olmo2": LLAMA,
    "gemma3": LLAMA,
    "phi3": FUSED,
}
TOKENS = np.arange(3, 19)
FLOAT = np.dtype(np.float32)


def with_adapters(model: TinyModel, directories: list[Any], slots: np.ndarray) -> dict[str, Any]:
    """The model's parameters with these adapters in slots from 1 on, for tokens with `slots`."""
    stated = model.family.param_specs(model.config)
    specs = adapter_specs(stated, 1, RANK)
    here = jax.tree.map(lambda spec: jax.sharding.SingleDeviceSharding(jax.devices()[0]), specs)
    one = jax.tree.map(of_one, specs)
    loaded = [
        list(read_adapter(path, stated, RANK, FLOAT).placed(one, here, FLOAT))
        for path in directories
    ]
    dims = [[spec.axes.index("adapters") for spec in jax.tree.leaves(layer)] for layer in specs]
    layers = []
    for index, p in enumerate(model.params["layers"]):
        leaves = [jax.tree.leaves(adapter[index]) for adapter in loaded]
        stacked = [jnp.concatenate(own, dim) for dim, *own in zip(dims[index], *leaves)]
        adapters = jax.tree.structure(loaded[0][index]).unflatten(stacked)
        layers.append(adapted(p, adapters, jnp.asarray(slots)))
    return model.params | {"layers": layers}


@pytest.mark.parametrize("member", SHAPES)
def test_adapters_give_what_merged_weights_give(tmp_path, member):
    model = TinyModel.write_member(tmp_path, member)
    targets = SHAPES[member]
    first = write_adapter(tmp_path / "a", model, targets=targets, seed=1)
    second = write_adapter(
        tmp_path / "b", model, rank=RANK, targets=targets[1:], seed=2, use_rslora=True
    )
    wanted = [
        each.logits(TOKENS)
        for each in (
            model,
            merged(model, first, tmp_path / "merged-a"),
            merged(model, second, tmp_path / "merged-b"),
        )
    ]
    assert min(np.abs(logits - wanted[0]).max() for logits in wanted[1:]) > 0.1
    for slot in range(3):
        slots = np.full(len(TOKENS), slot, np.int32)
        params = with_adapters(model, [first, second], slots)
        logits = oracle.dense_logits(model.family, params, model.config, TOKENS)
        np.testing.assert_allclose(logits, wanted[slot], rtol=2e-3, atol=2e-3)


@pytest.fixture(scope="module")
def adapter(llama, tmp_path_factory):
    return write_adapter(tmp_path_factory.mktemp("lora") / "adapter", llama)


def read(llama, path, dtype=FLOAT):
    return read_adapter(path, llama.family.param_specs(llama.config), 8, dtype)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_dora": True}, "use_dora True"),
        ({"bias": "all"}, "bias 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "has r 2, and .*q_proj"),
        ({"rank_pattern": {"q_proj": 9}}, "max_lora_rank of 9 or more"),
        ({"rank_pattern": {".*q_proj": 2}}, "rank_pattern .* without regular expressions"),
        ({"rank_pattern": ["q_proj"]}, r"rank_pattern \['q_proj'\]; it must be an object"),
        ({"alpha_pattern": {"q_proj": "8"}}, "lora_alpha '8'"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"r": 0}, "r 0"),
        ({"r": 9}, "max_lora_rank of 9 or more"),
        ({"lora_alpha": None}, "lora_alpha None"),
        ({"target_modules": ["q_proj", "w_pack"]}, "'w_pack' in target_modules"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_are_not_implemented_are_refused_by_name(
    llama, adapter, tmp_path, options, words
):
    config = json.loads((adapter / "adapter_config.json").read_text()) | options
    tensors = load_file(adapter / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=words):
        read(llama, write_peft(tmp_path / "changed", config, tensors))


def test_modules_with_ranks_and_alphas_of_their_own(llama, tmp_path):
    path = write_adapter(
        tmp_path / "own",
        llama,
        rank_pattern={"layers.0.self_attn.q_proj": 2, "q_proj": 3, "down_proj": 6},
        alpha_pattern={"down_proj": 3.0, "model.layers.1.mlp.up_proj": 20},
    )
    wanted = merged(llama, path, tmp_path / "merged").logits(TOKENS)
    params = with_adapters(llama, [path], np.full(len(TOKENS), 1, np.int32))
    logits = oracle.dense_logits(llama.family, params, llama.config, TOKENS)
    np.testing.assert_allclose(logits, wanted, rtol=2e-3, atol=2e-3)
    assert np.abs(logits - llama.logits(TOKENS)).max() > 0.1


def test_numbers_that_are_not_finite_are_refused(llama, adapter, tmp_path):
    """A step multiplies them with other requests' tokens too."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    for number, dtype in ((np.nan, FLOAT), (np.inf, FLOAT), (6e4, np.dtype(np.float16))):
        tensors = load_file(adapter / "adapter_model.safetensors")
        name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
        tensors[name][3, 2] = number
        changed = write_peft(tmp_path / str(number), config, tensors)
        with pytest.raises(AdapterError, match=r"down_proj\.lora_B.*not finite"):
            read(llama, changed, dtype)


def damaged(tensors, case):
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    if case == "another base":
        tensors[name] = np.zeros((4, 65), np.float32)
    elif case == "another rank":
        tensors[name] = np.zeros((3, 64), np.float32)
    elif case == "fewer layers":
        tensors = {key: tensor for key, tensor in tensors.items() if "layers.1." not in key}
    elif case == "more layers":
        deeper = {key.replace("layers.1.", "layers.99."): each for key, each in tensors.items()}
        tensors = tensors | deeper
    elif case == "missing target":
        tensors["base_model.model.lm_head.lora_A.weight"] = np.zeros((4, 64), np.float32)
    elif case == "other half":
        del tensors[name]
    elif case == "nothing":
        tensors.clear()
    return tensors


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("another base", "another base model, 'org/base'.*\\[4, 65\\].*\\[4, 64\\]"),
        ("another rank", "has r 4, and .*q_proj.* has shape \\[3, 64\\]; save"),
        ("fewer layers", r"another base model.*: it has \w+ in 1 of 2 layers, .* model.layers.1"),
        ("more layers", "another base model, 'org/base': it changes .*layers.99.*, which is not"),
        ("missing target", "lm_head.* no linear layer.*q_proj"),
        ("other half", "without its other half"),
        ("nothing", "no tensors"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(llama, adapter, tmp_path, case, words):
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = damaged(load_file(adapter / "adapter_model.safetensors"), case)
    with pytest.raises(AdapterError, match=words):
        read(llama, write_peft(tmp_path / "changed", config, tensors))


def test_an_adapter_may_change_some_layers(llama, adapter, tmp_path):
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = damaged(load_file(adapter / "adapter_model.safetensors"), "fewer layers")
    config["layers_to_transform"] = [0]
    changed = read(llama, write_peft(tmp_path / "changed", config, tensors))
    assert changed.tensors and not any("layers.1." in name for name in changed.tensors)


def test_directories_that_are_no_adapters_are_refused(llama, adapter, tmp_path):
    with pytest.raises(AdapterError, match="no directory"):
        read(llama, tmp_path / "nowhere")
    for path in ("~no-such-user/adapter", tmp_path / ("long" * 100), "a\0b"):
        with pytest.raises(AdapterError):
            read(llama, path)
    with pytest.raises(AdapterError, match="no adapter_config"):
        read(llama, tmp_path)
    config = (adapter / "adapter_config.json").read_text()
    (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(AdapterError, match="adapter_model"):
        read(llama, tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(AdapterError, match="pickle"):
        read(llama, tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"garbage!" * 3)
    with pytest.raises(AdapterError, match="truncated or corrupt"):
        read(llama, tmp_path)
