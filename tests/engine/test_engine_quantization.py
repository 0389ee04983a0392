"""Engines whose weights stay packed give the tokens of the weights that these mean."""

from __future__ import annotations

import family_members
import jax
import pytest
from gguf import GGMLQuantizationType as Kind
from tiny_checkpoints import CONFIG, hf_shapes, write_gguf
from tiny_engines import CONTEXT, EOS, LONGEST, Arrival, TinyModel, drive

from jaxserve.core.errors import ConfigError
from jaxserve.core.sampling_params import SamplingParams
from pallas_kernels.quantized_matmul import mosaic_tpu

GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)


def size(params) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(params))


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
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


@pytest.mark.interpreted
def test_a_kernel_multiplies(llama, monkeypatch):
    """On CPUs the TPU's, interpreted."""
    multiplied, kernel = [], mosaic_tpu.quantized_matmul

    def quantized_matmul(weight, x, *, interpret):
        multiplied.append(weight.shape)
        return kernel(weight, x, interpret=interpret)

    monkeypatch.setattr(mosaic_tpu, "quantized_matmul", quantized_matmul)
    model = llama.rounded("int8")
    settings = {"max_num_seqs": 1, "max_num_batched_tokens": 33, "compilation_cache": False}
    with llama.load(quantization="int8", attention_backend="pallas", **settings) as llm:
        for output in drive(llm.engine, [Arrival(prompt, GREEDY) for prompt in model.prompts[-3:]]):
            model.check_greedy(output)
    assert multiplied


def test_unknown_names_are_refused(llama):
    with pytest.raises(ConfigError, match="quantization is 'awq'; it must be one of gguf, int8"):
        llama.load(quantization="awq")
