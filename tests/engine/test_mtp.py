"""DeepSeek V3's layer for a further token drafts as published, and changes no token."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from draft_layers import Layer, MTPCheckpoint, Reference, check_moved, mtp_checkpoint, slots
from kv_engines import Preempter, token_ids
from tiny_checkpoints import write_hf
from tiny_engines import LONGEST, Arrival, TinyModel, drive

from jaxserve.core.errors import ConfigError, WeightsError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.models import rope
from jaxserve.models.drafters.feature_layer import FeatureLayer, model_logits

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
def layer(checkpoint, model, tmp_path_factory) -> Layer:
    """The layer as section 2.2 of the report has it, in numpy but for its block, which is loaded
    and computed as one more of a model's own layers."""
    raw, own = checkpoint.raw, checkpoint.own
    ordinary = raw | {
        "num_hidden_layers": raw["num_hidden_layers"] + 1,
        "num_nextn_predict_layers": 0,
    }
    directory = tmp_path_factory.mktemp("ordinary") / "model"
    longer = TinyModel.open(write_hf(directory, ordinary, checkpoint.tensors))
    last = longer.config.layer_kinds[-1]
    assert last == longer.config.layer_kinds[1]  # One of experts, unlike the first.

    def normed(x, name):
        x = np.asarray(x)
        eps = raw["rms_norm_eps"]
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * own[name]

    def fuse(params, config, embedded, states, positions):
        both = np.concatenate([normed(embedded, "enorm"), normed(states, "hnorm")], axis=-1)
        x = jnp.asarray(both @ own["eh_proj"].T)
        return x, rope.rotation(config.rope, config.max_position_embeddings, positions)

    def expected(params, config, x):
        return jnp.asarray(normed(x, "shared_head.norm"))

    moe = dataclasses.replace(longer.config.moe, sparse_layers=(True,))
    alone = dataclasses.replace(
        longer.config, num_layers=1, sliding_windows=(None,), rope_layers=(True,), moe=moe
    )
    feature_layer = FeatureLayer(longer.family, fuse, expected, model_logits)
    return Layer(DRAFTER, alone, {"layers": longer.params["layers"][-1:]}, feature_layer)


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
