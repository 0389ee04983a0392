"""Checkpoints with a `quantization_config`: stored values are what the format's definition says,
packed and dequantized, and what is not implemented is refused before weights are read."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from quantized_checkpoints import FORMATS, GROUP, quantized, write
from tiny_checkpoints import CONFIG, of_experts, random_tensors, write_hf

from jaxserve.core.errors import ConfigError, ModelError, WeightsError
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.convert import convert
from jaxserve.models.loading.params import load_params, params_bytes
from jaxserve.models.quantization import with_formats
from jaxserve.models.quantization_config import parse
from jaxserve.models.registry import param_specs
from pallas_kernels.quantized_matmul import QuantizedWeight, dequantize

LINEAR = ("qkv", "attn_out", "gate_up", "down")


def load(path, quantization=None):
    """The parameters, packed where they can be if `quantization` is the checkpoint's method."""
    checkpoint = open_checkpoint(path)
    specs = param_specs(checkpoint.config)
    specs = with_formats(specs, quantization, checkpoint.stored_format, checkpoint.quantization)
    params = load_params(checkpoint, specs, dtype="float32")
    held = sum(array.nbytes for array in jax.tree.leaves(params))
    assert held == params_bytes(specs, np.dtype(np.float32))
    return params


def is_packed(param):
    return isinstance(param, QuantizedWeight)


def assert_same(params, expected):
    def same(param, array):
        values = dequantize(param) if is_packed(param) else param
        np.testing.assert_array_equal(np.asarray(values).reshape(array.shape), array)

    jax.tree.map(same, params, expected, is_leaf=is_packed)


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_of_the_definition(tmp_path, name):
    """In float32, to the last bit, from slices and from whole tensors."""
    path, plain = write(tmp_path, CONFIG, random_tensors(CONFIG), name)
    expected, method = load(plain), FORMATS[name][0]["quant_method"]
    assert_same(load(path), expected)
    packed = load(path, method)
    assert_same(packed, expected)
    for layer in packed["layers"]:
        assert {key for key in layer if is_packed(layer[key])} == set(LINEAR)
    assert not is_packed(packed["embed"]) and not is_packed(packed["lm_head"])


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("fp8", 8),
        ("fp8 in blocks", 8 + 32 / 32),
        ("compressed-tensors W8A8", 8),
        ("compressed-tensors W4A16", 4 + 32 / GROUP),
        ("awq", 4 + 64 / GROUP),
        ("gptq of 8 bits", 8 + 32 / GROUP),
    ],
)
def test_the_plan_counts_what_is_held(tmp_path, name, bits):
    """Of `down`, 64 x 96: its values and scales of four bytes. The config alone says as much."""
    path, _ = write(tmp_path, CONFIG, random_tensors(CONFIG), name)
    method = FORMATS[name][0]["quant_method"]
    down = load(path, method)["layers"][0]["down"]
    per_output = 4 * 64 if bits == 8 else 0
    assert sum(plane.nbytes for plane in jax.tree.leaves(down)) == 64 * 96 * bits / 8 + per_output
    specs = []
    for load_format in ("auto", "dummy"):
        opened = open_checkpoint(path, load_format)
        assert opened.quantization == method
        found = with_formats(
            param_specs(opened.config), method, opened.stored_format, opened.quantization
        )
        specs.append([spec.format for spec in jax.tree.leaves(found)])
    assert specs[0] == specs[1]


@pytest.mark.parametrize("name", ["fp8", "compressed-tensors fp8"])
def test_static_scales_of_activations_are_left_out(tmp_path, name):
    stored, plain = quantized(random_tensors(CONFIG), name)
    modules = [each.removesuffix("weight_scale") for each in stored if each.endswith("_scale")]
    scales = {f"{module}input_scale": np.float32([0.1]) for module in modules}
    method = FORMATS[name][0]
    group = method.get("config_groups", {}).get("group_0")
    static = {"activation_scheme": "static"}
    if group:
        static = in_group(method, input_activations={"num_bits": 8, "dynamic": False})
    config = CONFIG | {"quantization_config": method | static}
    packed = load(write_hf(tmp_path / "quantized", config, stored | scales), method["quant_method"])
    assert_same(packed, load(write_hf(tmp_path / "plain", CONFIG, plain)))


@pytest.mark.parametrize(
    "name", ["fp8 in blocks", "awq", "compressed-tensors W8A8", "gptq in activation order"]
)
def test_fused_tensors_and_experts(tmp_path, name):
    moe = of_experts("Qwen3MoeForCausalLM")
    for fields in ({"architectures": ["Phi3ForCausalLM"]}, moe):
        architecture, config = fields["architectures"][0], CONFIG | fields
        path, plain = write(tmp_path / architecture, config, random_tensors(config), name)
        expected, method = load(plain), FORMATS[name][0]["quant_method"]
        packed = load(path, method)
        assert_same(packed, expected)
        assert_same(load(path), expected)
        large = "experts_down" if fields is moe else "qkv"
        assert is_packed(packed["layers"][1][large])


def test_layers_with_one_input_in_different_orders(tmp_path):
    """Which no tool writes: refused as packed weights, as one product has one order."""
    tensors, plain = quantized(random_tensors(CONFIG), "gptq in activation order")
    config = CONFIG | {"quantization_config": FORMATS["gptq in activation order"][0]}
    name = "model.layers.1.self_attn.k_proj.g_idx"
    path = write_hf(tmp_path / "quantized", config, tensors | {name: tensors[name][::-1].copy()})
    with pytest.raises(WeightsError, match=r"\.q_proj and .*\.k_proj have .* different orders"):
        load(path, "gptq")
    converted = load(convert(path, tmp_path / "orbax", dtype="float32"))
    expected = load(write_hf(tmp_path / "plain", CONFIG, plain))
    np.testing.assert_array_equal(converted["layers"][0]["qkv"], expected["layers"][0]["qkv"])


def test_modules_that_are_not_converted(tmp_path):
    """By the lists of each method; a parameter that is quantized in part is dequantized."""
    tensors = random_tensors(CONFIG)
    kept = "model.layers.0.self_attn.k_proj.weight"
    lists = {
        "fp8": {"modules_to_not_convert": ["layers.0.self_attn.k_proj"]},
        "awq": {"modules_to_not_convert": ["0.self_attn.k_proj"]},
        "compressed-tensors W4A16": {"ignore": ["lm_head", "re:.*layers[.]0.*k_proj$"]},
    }
    for name, fields in lists.items():
        stored, plain = quantized(tensors, name)
        for other in [each for each in stored if each.startswith(kept.removesuffix("weight"))]:
            del stored[other]
        stored[kept] = plain[kept] = tensors[kept]
        config = CONFIG | {"quantization_config": FORMATS[name][0] | fields}
        path = write_hf(tmp_path / name, config, stored)
        packed = load(path, FORMATS[name][0]["quant_method"])
        assert_same(packed, load(write_hf(tmp_path / f"plain {name}", CONFIG, plain)))
        assert not is_packed(packed["layers"][0]["qkv"])
        assert is_packed(packed["layers"][0]["attn_out"])


def test_names_in_lists_are_whole():
    fields = {"quant_method": "fp8", "modules_to_not_convert": ["layers.1", "gate", "lm_head"]}
    config = parse({"quantization_config": fields})
    for module in ("model.layers.1.mlp.up_proj", "model.layers.0.mlp.gate", "lm_head"):
        assert config.scheme(module) is None
    for module in ("model.layers.10.mlp.up_proj", "model.layers.0.mlp.gate_proj"):
        assert config.scheme(module) is not None


def test_modules_of_several_schemes():
    """The first whose targets match; names and patterns before classes."""
    four, eight = (
        {"weights": {"num_bits": bits, "type": "int", "strategy": "channel"}} for bits in (4, 8)
    )
    config = parse(
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "mixed-precision",
                "config_groups": {
                    "group_0": four | {"targets": ["Linear"], "format": "pack-quantized"},
                    "group_1": eight | {"targets": ["re:.*down_proj$"], "format": "int-quantized"},
                },
                "ignore": ["model.layers.3.mlp.up_proj"],
            }
        }
    )
    assert config.scheme("model.layers.0.mlp.up_proj").bits == 4
    assert config.scheme("model.layers.0.mlp.down_proj").bits == 8
    assert config.scheme("model.layers.3.mlp.up_proj") is None


def test_a_converted_model_is_not_quantized(tmp_path):
    path, plain = write(tmp_path, CONFIG, random_tensors(CONFIG), "awq")
    converted = convert(path, tmp_path / "orbax", dtype="float32")
    assert "quantization_config" not in json.loads((converted / "config.json").read_text())
    assert_same(load(converted), load(plain))


def test_other_settings_of_memory(tmp_path):
    """Weights may be rounded again, and no other method may be asked for."""
    path, _ = write(tmp_path, CONFIG, random_tensors(CONFIG), "awq")
    assert load(path, "int8")["layers"][0]["qkv"].format.values == "int8"
    with pytest.raises(ConfigError, match=r"quantization is 'gptq', but .* stored as awq"):
        load(path, "gptq")
    with pytest.raises(ConfigError, match="no weights in blocks"):
        load(path, "gguf")


def test_biases_of_zeros_are_not_needed(tmp_path):
    """Which AutoGPTQ writes for layers that have none."""
    tensors, _ = quantized(random_tensors(CONFIG), "gptq")
    config = CONFIG | {"quantization_config": FORMATS["gptq"][0]}
    bias = "model.layers.0.self_attn.q_proj.bias"
    load(write_hf(tmp_path / "zeros", config, tensors | {bias: np.zeros(128, np.float16)}))
    with pytest.raises(WeightsError, match=r"q_proj\.bias is not used by the model"):
        load(write_hf(tmp_path / "ones", config, tensors | {bias: np.ones(128, np.float16)}))


def changed(tmp_path, name, change):
    tensors, _ = quantized(random_tensors(CONFIG), name)
    change("model.layers.1.mlp.down_proj", tensors)
    return write_hf(tmp_path, CONFIG | {"quantization_config": FORMATS[name][0]}, tensors)


def without(last):
    return lambda module, tensors: tensors.pop(f"{module}.{last}")


def with_(last, make):
    def change(module, tensors):
        tensors[f"{module}.{last}"] = make(tensors[f"{module}.{last}"])

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "compressed-tensors W8A8",
            without("weight_scale"),
            r"down_proj\.weight has no scales: .*\.weight_scale is missing",
        ),
        ("awq", without("scales"), r"qweight has no scales: .*\.scales is missing"),
        ("awq", without("qzeros"), r"qweight has no zero points: .*\.qzeros is missing"),
        ("gptq", without("qweight"), r"down_proj\.weight is missing"),
        ("gptq in activation order", without("g_idx"), r"no order of inputs: .*g_idx is missing"),
        ("compressed-tensors W4A16", without("weight_shape"), r"weight_shape is missing"),
        (
            "compressed-tensors W4A16",
            with_("weight_shape", lambda shape: shape * 2),
            r"weight_shape is \[128, 192\], and .* has \[64, 96\]",
        ),
        (
            "compressed-tensors W4A16",
            with_("weight_scale", lambda scales: scales[:, :2].copy()),
            r"weight_scale has shape \[64, 2\]; it must be \[64, 3\]",
        ),
        (
            "awq",
            with_("qzeros", lambda zeros: zeros[:2].copy()),
            r"qzeros has shape \[2, 8\]; it must be \[3, 8\]",
        ),
        (
            "awq",
            with_("scales", lambda scales: scales.astype(np.float64)),
            "scales is F64; scales may be F32, F16, BF16",
        ),
        (
            "gptq in activation order",
            with_("g_idx", lambda groups: groups + 1),
            "g_idx has groups from 1 to 3; there are 3. Fetch",
        ),
        (
            "awq",
            with_(
                "scales",
                lambda scales: (
                    np.where(np.arange(scales.size) == 5, np.nan, scales.ravel())
                    .reshape(scales.shape)
                    .astype(scales.dtype)
                ),
            ),
            r"down_proj\.scales is not finite everywhere",
        ),
        (
            "gptq in activation order",
            with_("g_idx", lambda groups: groups[1:].copy()),
            r"g_idx has shape \[95\]; it must be \[96\]",
        ),
        (
            "compressed-tensors W8A8",
            with_("weight", lambda weight: weight[None].copy()),
            r"down_proj\.weight has shape \[1, 64, 96\]; it must have outputs and inputs",
        ),
        (
            "fp8",
            with_("weight_scale", lambda scale: np.ones(3, np.float32)),
            r"weight_scale has shape \[3\]; it must be \[64, 1\]",
        ),
        (
            "fp8",
            with_("weight_scale", lambda scale: np.ones(1, np.int8)),
            r"down_proj\.weight_scale is I8; weights may be F64",
        ),
        (
            "compressed-tensors W8A8",
            lambda module, tensors: tensors.update({"model.norm.weight": np.ones(64, np.int8)}),
            r"model\.norm\.weight has no scales: model\.norm\.weight_scale is missing",
        ),
        (
            "awq",
            lambda module, tensors: tensors.update({f"{module}.k_scale": np.ones(1, np.float32)}),
            r"down_proj\.k_scale is not used by the model",
        ),
    ],
)
def test_tensors_that_do_not_fit_together(tmp_path, name, change, message):
    path = changed(tmp_path, name, change)
    with pytest.raises(ModelError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_("qzeros", lambda zeros: zeros + 1), r"qzeros has zero points other than 8"),
        (
            with_("g_idx", lambda groups: np.roll(groups, 1)),
            r"g_idx has groups whose inputs are not in a row",
        ),
    ],
)
def test_a_config_that_files_contradict(tmp_path, change, message):
    """A plan was made of the config; what would hold other values is refused."""
    path = changed(tmp_path, "gptq", change)
    with pytest.raises(WeightsError, match=message):
        load(path, "gptq")


def test_groups_of_different_sizes(tmp_path):
    """Which activation order does not make."""
    change = with_("g_idx", lambda groups: np.where(np.arange(96) < 1, (groups + 1) % 3, groups))
    path = changed(tmp_path, "gptq in activation order", change)
    message = r"g_idx has groups that are not all of 32 inputs; write .*`jaxserve convert`"
    with pytest.raises(WeightsError, match=message):
        load(path, "gptq")


@pytest.mark.parametrize("method", [None, "gptq"])
def test_an_order_that_was_never_set(tmp_path, method):
    """compressed-tensors initializes it to -1, which means none."""
    none = with_("g_idx", lambda groups: np.full_like(groups, -1))
    in_a_row = with_("g_idx", lambda groups: (np.arange(96) // 32).astype(groups.dtype))
    paths = (
        changed(tmp_path / name, "gptq", change) for name, change in (("a", none), ("b", in_a_row))
    )
    found, expected = (load(path, method) for path in paths)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_an_ignored_module_that_is_quantized(tmp_path):
    for name in ("compressed-tensors W8A8", "awq"):
        field = "ignore" if "compressed" in name else "modules_to_not_convert"
        fields = {field: ["lm_head", "model.layers.1.mlp.down_proj"]}
        path, _ = write(tmp_path / name, CONFIG, random_tensors(CONFIG), name, **fields)
        with pytest.raises(
            WeightsError, match=r"layers\.1\.mlp\.down_proj\.weight is (I8|missing)"
        ):
            load(path)


W8A8, W4A16 = (FORMATS[name][0] for name in ("compressed-tensors W8A8", "compressed-tensors W4A16"))


def in_group(config, **fields):
    group = config["config_groups"]["group_0"]
    return config | {"config_groups": {"group_0": group | fields}}


def with_weights(config, **fields):
    return in_group(config, weights=config["config_groups"]["group_0"]["weights"] | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'.*quant_method may be awq, gptq, fp8"),
        ({"quant_method": "mxfp4"}, "'mxfp4'.*quant_method may be awq"),
        ("awq", "quantization_config 'awq'"),
        (
            {"quant_method": "fp8", "activation_scheme": "token"},
            r"quantization_config\.activation_scheme 'token', which is not implemented",
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme {'num_bits"),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            r"weight_block_size \[128\]; it must",
        ),
        (FORMATS["awq"][0] | {"version": "gemv"}, "version 'gemv'.*'gemm' is"),
        (FORMATS["awq"][0] | {"bits": 3}, "bits 3"),
        (FORMATS["awq"][0] | {"zero_point": False}, "zero_point False"),
        (FORMATS["awq"][0] | {"group_size": "x"}, "group_size 'x'; it must be an integer"),
        (FORMATS["gptq"][0] | {"bits": 3}, "bits 3, which is not implemented; 4 and 8 are"),
        (FORMATS["gptq"][0] | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (FORMATS["gptq"][0] | {"is_marlin_format": True}, "is_marlin_format True"),
        (FORMATS["gptq"][0] | {"dynamic": {"-:.*": {}}}, "dynamic {'-:"),
        (FORMATS["gptq"][0] | {"group_size": None}, "group_size None; it must be an integer"),
        (FORMATS["gptq"][0] | {"rotation": "hadamard"}, "rotation 'hadamard', which is not"),
        (in_group(W8A8, rotation="hadamard"), r"group_0\.rotation 'hadamard'"),
        (with_weights(W8A8, offset=0.5), r"weights\.offset 0.5, which is not"),
        (FORMATS["gptq"][0] | {"desc_act": "yes"}, "desc_act 'yes'; it must be true or false"),
        (W8A8 | {"format": "marlin-24"}, "format 'marlin-24'"),
        (W8A8 | {"quantization_status": "initialized"}, "quantization_status 'initialized'"),
        (W8A8 | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme {'num_bits': 8}"),
        (W8A8 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "format 'sparse-24-bitmask'"),
        (W8A8 | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        (
            in_group(W8A8, input_activations={"num_bits": 8, "dynamic": "local"}),
            r"config_groups\.group_0\.input_activations\.dynamic 'local'",
        ),
        (in_group(W8A8, output_activations={"num_bits": 8}), "output_activations {'num_bits'"),
        (in_group(W8A8, targets="Linear"), "targets 'Linear'; it must be a list of strings"),
        (in_group(W8A8, weights=None), r"group_0\.weights None; it must be an object"),
        (
            W8A8 | {"config_groups": {"W8A8": ["Linear"]}},
            r"W8A8 \['Linear'\]; it must be an object",
        ),
        (with_weights(W8A8, type="float"), r"weights\.type 'float'"),
        (with_weights(W8A8, strategy="tensor_group"), "strategy 'tensor_group'"),
        (with_weights(W4A16, num_bits=3), "num_bits 3"),
        (with_weights(W4A16, group_size=None), "group_size None; it must be an integer"),
        (with_weights(W4A16, group_size=0), "group_size 0; it must be an integer"),
        (W8A8 | {"ignore": ["re:(a+)+$"]}, "could take too long to match"),
        (W8A8 | {"ignore": ["re:(m|m)(o|o)(d|d)(e|e)(l|l)$"]}, "could take too long to match"),
        (W8A8 | {"ignore": ["re:["]}, "which is no pattern"),
    ],
)
def test_what_is_not_implemented_is_refused(tmp_path, fields, message):
    """By name and value, of a config alone."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"quantization_config": fields}))
    with pytest.raises(ModelError, match=message):
        open_checkpoint(path, "dummy")
