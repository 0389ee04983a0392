"""DeepSeek V3's layer for a further token drafts as published, and changes no token."""

from __future__ import annotations

import dataclasses

import pytest
from draft_layers import Layer, MTPCheckpoint, Reference, check_moved, mtp_checkpoint, slots
from exhaustive import combination
from kv_engines import Preempter, token_ids
from tiny_engines import LONGEST, Arrival, TinyModel, drive

from jaxserve.core.errors import ConfigError, WeightsError
from jaxserve.core.requests.sampling_params import SamplingParams
from pallas_kernels.quantized_matmul import QuantizedWeight

DRAFTS = 3
PLAIN = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
FEW = dataclasses.replace(PLAIN, temperature=1.0, seed=3, allowed_token_ids=(7, 8, 9))
DRAFTER = {"method": "mtp", "num_speculative_tokens": DRAFTS}


@pytest.fixture(scope="module")
def checkpoint() -> MTPCheckpoint:
    return mtp_checkpoint()


@pytest.fixture(scope="module")
def model(checkpoint, tmp_path_factory) -> TinyModel:
    return TinyModel.open(checkpoint.write(tmp_path_factory.mktemp("mtp") / "model"))


@pytest.fixture(scope="module")
def layer(checkpoint, tmp_path_factory) -> Layer:
    return checkpoint.layer(tmp_path_factory.mktemp("ordinary") / "model", DRAFTER, None)


@pytest.fixture(scope="module")
def llm(model):
    rows = {"max_num_seqs": 2, "max_num_batched_tokens": 2 * (1 + DRAFTS) + 16}
    pool = 90 * model.token_bytes * 4  # A page has one layer more than the model.
    with model.load(speculative_config=DRAFTER, **rows, kv_cache_memory_bytes=pool) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(model):
    with model.load(max_num_seqs=1, max_num_batched_tokens=17) as llm:
        yield lambda prompt, params: token_ids(drive(llm.engine, [Arrival(prompt, params)])[0])


@pytest.mark.parametrize("share", [0.0, 0.4], ids=["running on", "preempted"])
def test_drafts_are_those_of_the_published_layer(llm, alone, model, layer, share):
    """With a prompt of several chunks; twice, the second time from cached pages."""
    preempt, seen, counts = Preempter(llm.engine, 2, share=share), [], []
    prompt = max(model.prompts, key=len)

    def look():
        seen.extend(slots(llm.engine))
        preempt()

    for params in (PLAIN, FEW):
        seen.clear()
        llm.reset_prefix_cache()  # What followed the last page was another token.
        others = [Arrival(model.prompts[place], params, place) for place in (2, 8)]
        arrivals = [Arrival(prompt, params), *others, Arrival(prompt, params, 60)]
        outputs = drive(llm.engine, arrivals, look)
        for arrival, output in zip(arrivals, outputs):
            assert token_ids(output) == alone(arrival.prompt, params)
        reference = Reference(model, layer, [*prompt, *outputs[0].outputs[0].token_ids])
        of_drafts = params is PLAIN and not share
        assert reference.check(seen, len(prompt), of_drafts) >= LONGEST // (1 + DRAFTS)
        counts.append(int(llm.get_metrics()["vllm:spec_decode_num_accepted_tokens_total"].value))
    assert counts[1] > counts[0] + 5  # Of three tokens many are guessed right.


def test_the_layer_goes_on_where_its_request_does(llm, model, layer):
    """Its KV is latents, as that of the model."""
    check_moved(llm, model, layer, max(model.prompts, key=len), PLAIN)


@pytest.mark.parametrize(("quantization", "times"), [("int8", 1), combination("int4", 4)])
def test_the_layer_is_rounded_as_the_model_is(tmp_path, quantization, times):
    checkpoint = mtp_checkpoint(times)
    layer = checkpoint.layer(tmp_path / "ordinary", DRAFTER, quantization)
    model = TinyModel.open(checkpoint.write(tmp_path / "model")).rounded(quantization)
    prompt, seen = model.prompts[3], []
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 1 + DRAFTS + 16}
    pool = 40 * model.token_bytes * 4
    with model.load(
        quantization=quantization,
        speculative_config=DRAFTER,
        kv_cache_memory_bytes=pool,
        **sizes,
    ) as llm:
        drafting = llm.engine._runner._state.draft_params["layers"][0]
        for name in ("queries", "attn_out", "experts_gate_up", "shared_down"):
            assert isinstance(drafting[name], QuantizedWeight), name
        engine = llm.engine
        (output,) = drive(engine, [Arrival(prompt, PLAIN)], lambda: seen.extend(slots(engine)))
    model.check_greedy(output)
    reference = Reference(model, layer, [*prompt, *output.outputs[0].token_ids])
    assert reference.check(seen, len(prompt), of_drafts=True) >= LONGEST // (1 + DRAFTS)


def test_models_without_the_layer_are_refused(checkpoint, llama, tmp_path):
    with pytest.raises(ConfigError, match="the method is 'mtp', but this LlamaForCausalLM has no"):
        llama.load(speculative_config=DRAFTER)
    del (own := dict(checkpoint.own))["hnorm"]
    broken = dataclasses.replace(checkpoint, own=own).write(tmp_path / "broken")
    with pytest.raises(
        WeightsError, match=r"(?s)for the method 'mtp' do .*hnorm.weight is missing"
    ):
        TinyModel.open(broken).load(speculative_config=DRAFTER)
    with pytest.raises(ConfigError, match=r"model of speculative_config is .* 'mtp'"):
        llama.load(speculative_config=DRAFTER | {"model": "layer"})
