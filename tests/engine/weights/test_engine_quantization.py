"""Engines whose weights stay packed give the tokens of the weights that these mean."""

from __future__ import annotations

import json

import family_members
import jax
import pytest
from exhaustive import combination
from gguf import GGMLQuantizationType as Kind
from quantized_checkpoints import FORMATS, write
from tiny_checkpoints import CONFIG, hf_shapes, write_gguf
from tiny_engines import CONTEXT, EOS, LONGEST, Arrival, TinyModel, drive

from jaxserve.core.errors import ConfigError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig
from jaxserve.runtime.hardware.devices import DescribedDevice
from jaxserve.runtime.startup.engine_plan import plan_described
from pallas_kernels.quantized_matmul import QuantizedWeight, mosaic_tpu

GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)


def size(params) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(params))


@pytest.mark.parametrize("quantization", ["int8", "int4", combination("fp8")])
def test_rounded_weights(llama, quantization):
    model = llama.rounded(quantization)
    with llama.load(quantization=quantization) as llm:
        arrivals = [Arrival(prompt, GREEDY, step) for step, prompt in enumerate(model.prompts)]
        for output in drive(llm.engine, arrivals):
            model.check_greedy(output)
        assert llm.plan().memory.weights_bytes < 0.75 * size(llama.params)


def test_a_gguf_file_as_it_is(tmp_path):
    """The same tokens as unpacked, of little more than a byte a weight."""
    raw = CONFIG | {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": EOS,
    }
    tensors = family_members.tensors(hf_shapes(raw))
    path = write_gguf(tmp_path / "m.gguf", raw, tensors, kind=Kind.Q8_0)
    model = TinyModel.open(path)
    with model.load(quantization="gguf") as llm:
        assert llm.plan().memory.weights_bytes < 0.3 * size(model.params)
        arrivals = [Arrival(prompt, GREEDY) for prompt in model.prompts]
        for output in drive(llm.engine, arrivals):
            model.check_greedy(output)


def write_quantized(directory, name, **fields):
    raw = CONFIG | {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": EOS,
    }
    raw |= fields
    tensors = family_members.tensors(hf_shapes(raw))
    return TinyModel.open(write(directory, raw, tensors, name)[0])


@pytest.mark.parametrize("name", ["awq", combination("fp8 in blocks"), "gptq in activation order"])
def test_a_quantized_checkpoint_as_it_is(tmp_path, caplog, name):
    """Without a setting: the tokens of the weights that it stands for, in its own format."""
    model = write_quantized(tmp_path, name)
    with model.load() as llm:
        assert llm.plan().config.quantization == FORMATS[name][0]["quant_method"]
        held = llm.engine._runner._state.params
        assert llm.plan().memory.weights_bytes == size(held)
        assert all(isinstance(p["qkv"], QuantizedWeight) for p in held["layers"])
        arrivals = [Arrival(prompt, GREEDY) for prompt in model.prompts[-4:]]
        for output in drive(llm.engine, arrivals):
            model.check_greedy(output)
    assert "dequantized" not in caplog.text


SKIPPING = {"method": "layer_skip", "num_layers": 1, "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    "settings", [{"weights_on": "host"}, combination({"speculative_config": SKIPPING})]
)
def test_activation_order_of_streamed_and_of_drafting_layers(tmp_path, settings):
    """The latter after their memory was given back and taken again."""
    model = write_quantized(tmp_path, "gptq in activation order")
    with model.load(**settings) as llm:
        if "weights_on" not in settings:
            llm.sleep(level=2)
            llm.wake_up()
        for output in drive(llm.engine, [Arrival(prompt, GREEDY) for prompt in model.prompts[-2:]]):
            model.check_greedy(output)


def test_values_that_no_format_has(tmp_path, caplog):
    """Those whose inputs are not whole groups are dequantized, and the log says so."""
    model = write_quantized(tmp_path, "awq", intermediate_size=80)
    with model.load() as llm:
        assert llm.plan().weights_dequantized == (2, 14)
        held = llm.engine._runner._state.params
        assert not any(isinstance(p["down"], QuantizedWeight) for p in held["layers"])
        assert llm.plan().memory.weights_bytes == size(held)
        (output,) = drive(llm.engine, [Arrival(model.prompts[-1], GREEDY)])
        model.check_greedy(output)
    assert "2 of 14 weights stored as awq are dequantized to float32" in caplog.text


def test_plans_of_quantized_checkpoints(tmp_path):
    """Of a checkpoint that is quantized in part, and of one for several devices."""
    ignored = {"ignore": ["lm_head", "model.layers.0.self_attn.k_proj"]}
    raw = CONFIG | {
        "quantization_config": FORMATS["compressed-tensors W8A8"][0] | ignored,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    described = DescribedDevice("gpu", "NVIDIA H200", 1 << 37)
    one = plan_described(EngineConfig(str(path)), described)
    # Queries and values are held with the keys, which are not quantized.
    assert one.weights_dequantized == (2, 13)
    two = plan_described(EngineConfig(str(path), tensor_parallel_size=2), described)
    assert two.weights_dequantized == (2, 13)
    # Norms, the embedding's and the head's halves, and scales of rows aside.
    assert two.memory.weights_bytes < 0.6 * one.memory.weights_bytes
    # Layers that run as one in a pipeline are held alike.
    staged = plan_described(EngineConfig(str(path), pipeline_parallel_size=2), described)
    assert staged.weights_dequantized == (5, 13)


@pytest.mark.interpreted
@pytest.mark.oldest_jax
def test_a_kernel_multiplies(llama, monkeypatch):
    """On CPUs the TPU's, interpreted."""
    multiplied, kernel = [], mosaic_tpu.quantized_matmul

    def quantized_matmul(weight, x, *, interpret):
        multiplied.append(weight.shape)
        return kernel(weight, x, interpret=interpret)

    monkeypatch.setattr(mosaic_tpu, "quantized_matmul", quantized_matmul)
    model = llama.rounded("int8")
    settings = {"max_num_seqs": 1, "max_num_batched_tokens": 17, "compilation_cache": False}
    with llama.load(quantization="int8", attention_backend="pallas", **settings) as llm:
        for output in drive(llm.engine, [Arrival(prompt, GREEDY) for prompt in model.prompts[-3:]]):
            model.check_greedy(output)
    assert multiplied


def test_unknown_names_are_refused(llama):
    with pytest.raises(
        ConfigError, match="quantization is 'nf4'; it must be one of awq, gptq, compressed-tensors"
    ):
        llama.load(quantization="nf4")
    with pytest.raises(ConfigError, match="is 'awq', but the weights are stored otherwise"):
        llama.load(quantization="awq")
