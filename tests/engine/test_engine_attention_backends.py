"""Engines on Pallas kernels give the oracle's tokens: on CPUs, the TPU's kernels, interpreted."""

from __future__ import annotations

import json

import pytest
from kv_engines import Preempter, bytes_of, count
from tiny_engines import LONGEST, Arrival, TinyModel, drive

from jaxserve.core.errors import ConfigError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig
from jaxserve.runtime.hardware.devices import DescribedDevice
from jaxserve.runtime.startup.attention_backend import check_attention_backend
from jaxserve.runtime.startup.engine_plan import plan_described
from pallas_kernels import backends

GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
FEW = {"max_num_seqs": 2, "max_num_batched_tokens": 2 + 16}
"""Few programs: each has its kernel interpreted."""


@pytest.mark.interpreted
@pytest.mark.oldest_jax
def test_kernels_attend_and_move_pages(llama):
    """Chunks beside decodes, a prefix hit, pages that leave for the host and come back."""
    with llama.load(
        attention_backend="pallas", preemption="swap", host_kv_bytes=bytes_of(llama, 64), **FEW
    ) as llm:
        prompts = [*llama.prompts, llama.prompts[-1]]
        arrivals = [Arrival(prompt, GREEDY, step) for step, prompt in enumerate(prompts)]
        preempter = Preempter(llm.engine, evicts=True, share=0.3)
        for output in drive(llm.engine, arrivals, between=preempter):
            llama.check_greedy(output)
        assert preempter.count > 3
        assert count(llm.engine, "kv_saved_pages_total", "host") > 0
        assert count(llm.engine, "kv_fetched_pages_total", "host") > 0


@pytest.mark.interpreted
def test_windows_and_soft_caps(tmp_path):
    gemma = TinyModel.write_member(tmp_path, "gemma2")
    with gemma.load(attention_backend="pallas", **FEW) as llm:
        arrivals = [Arrival(prompt, GREEDY) for prompt in gemma.prompts[-4:]]
        for output in drive(llm.engine, arrivals):
            gemma.check_greedy(output)


def test_what_the_kernel_cannot_do_is_refused_before_weights_are_read(llama, monkeypatch):
    """Here by a TPU, which is only said to be there."""
    monkeypatch.setattr(backends, "target", lambda: ("tpu", "TPU v5 lite", True))
    with pytest.raises(ConfigError, match=r"\. .*head_dim is 16; it can be one of"):
        llama.load(attention_backend="pallas")
    with pytest.raises(ConfigError, match="it must be one of auto, xla, pallas"):
        llama.load(attention_backend="triton")


def test_what_the_kernel_cannot_do_for_a_draft_model_is_refused_too(tmp_path, monkeypatch):
    def config_of(head_dim):
        sizes = {"hidden_size": 2 * head_dim, "intermediate_size": 64, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "vocab_size": 64, "max_position_embeddings": 256}
        path = tmp_path / str(head_dim) / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"architectures": ["LlamaForCausalLM"]} | sizes | heads))
        return path

    def check(head_dim):
        drafts = {"model": config_of(head_dim), "num_speculative_tokens": 2}
        config = EngineConfig(
            config_of(64), attention_backend="pallas", speculative_config=drafts, max_num_seqs=2
        )
        planned = plan_described(config, DescribedDevice("tpu", "TPU v5 lite", 1 << 34))
        check_attention_backend(planned.shapes)

    monkeypatch.setattr(backends, "target", lambda: ("tpu", "TPU v5 lite", False))
    check(128)
    with pytest.raises(ConfigError, match=r"model of speculative_config: .*head_dim is 16"):
        check(16)
