"""Mixtures of experts: the same tokens in any company, and no more work than was chosen."""

from __future__ import annotations

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive import combination, combinations_of
from tiny_engines import LONGEST, Arrival, TinyModel, assert_loads, drive

from jaxserve.core.errors import ConfigError
from jaxserve.core.model_config import ClampedSwiGLU, MoEConfig
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig
from jaxserve.models import moe
from jaxserve.models.quantization import FORMATS, with_formats
from jaxserve.runtime.startup import engine_plan
from jaxserve.scheduler.policies import POLICIES
from pallas_kernels.quantized_matmul import dequantize, quantize

GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True, logprobs=1)
LAYERS = {"max_num_seqs": 2, "max_num_batched_tokens": 2 + 16, "page_size": 8}
FEW = (3, 6, 9)
"""Places of three prompts."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """With plain and sparse layers, an expert that all tokens share, and normed weights."""
    return TinyModel.write_member(tmp_path_factory.mktemp("moe"), "qwen2_moe")


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """With windows in turn, sinks, biases of routers and experts, and clamps."""
    return TinyModel.write_member(tmp_path_factory.mktemp("gpt_oss"), "gpt_oss")


def arrivals(model, places, apart=3):
    return [Arrival(model.prompts[place], GREEDY, apart * i) for i, place in enumerate(places)]


@pytest.mark.parametrize(
    "scheduler", combinations_of(POLICIES, "static", "orca", "splitfuse", "vllm", "medha")
)
def test_every_scheduler(gpt_oss, tmp_path, scheduler):
    with gpt_oss.load(scheduler=scheduler, trace_file=tmp_path / "trace.json", **LAYERS) as llm:
        outputs = drive(llm.engine, arrivals(gpt_oss, FEW, apart=0))
        assert_loads(llm.engine)
    for output in outputs:
        gpt_oss.check_greedy(output)


@pytest.mark.parametrize(
    "settings", [{}, combination({"batch_invariant": True}), combination({"program_scope": "step"})]
)
def test_metrics_say_which_experts_are_loaded(gpt_oss, tmp_path, settings):
    """Here the last ones, whatever the token."""
    moe = gpt_oss.config.moe
    count, chosen = moe.num_experts, moe.num_experts_per_tok
    params = jax.tree.map(lambda array: array, gpt_oss.params)
    for layer in params["layers"]:
        layer["router"] = jnp.zeros_like(layer["router"])
        layer["router_bias"] = jnp.arange(count, dtype=jnp.float32)
    with gpt_oss.load(trace_file=tmp_path / "trace.json", **LAYERS, **settings) as llm:
        assert llm.get_metrics()["jaxserve:expert_balancedness"].value == 1
        llm.update_weights(params)
        drive(llm.engine, arrivals(gpt_oss, FEW))
        assert_loads(llm.engine)
        metrics = llm.get_metrics()
    tokens = metrics["jaxserve:expert_tokens_total"]
    assert tokens.label == "expert"
    of_each = sum(tokens.value.values()) // chosen
    assert of_each > 0
    assert [*tokens.value.values()] == [0] * (count - chosen) + [of_each] * chosen
    assert [*tokens.value] == [str(expert) for expert in range(count)]
    assert metrics["jaxserve:expert_balancedness"].value == pytest.approx(chosen / count)


def logprobs(output):
    (completion,) = output.outputs
    return [
        (token, entry.logprob)
        for step in completion.logprobs
        for token, entry in sorted(step.items())
    ]


def test_batch_invariance_is_exact(model):
    """Other tokens of a tile are sorted between those of a sequence; the bits stay."""
    with model.load(batch_invariant=True, **LAYERS) as llm:
        together = drive(llm.engine, arrivals(model, FEW, apart=0))
        for place, crowded in zip(FEW, together, strict=True):
            llm.reset_prefix_cache()
            (alone,) = drive(llm.engine, arrivals(model, [place]))
            assert logprobs(alone) == logprobs(crowded)


MIXTURE = MoEConfig(8, 2, 64, (True,))
BIASED = dataclasses.replace(
    MIXTURE, norm_topk_prob=True, biased=True, clamped=ClampedSwiGLU(1.3, 0.5)
)
HIDDEN, FF = 32, 64
EXPERTS = ("experts_gate_up", "experts_down")


REAL = np.array([True, False, True, True, False, False, True, False] * 6)
"""Which tokens of a step belong to a sequence, as of several rows that are not full."""


def mixture_of(tokens, seed=0, skewed=False, biased=False):
    """Parameters and activations; `skewed`, most tokens choose the same two experts."""
    rng = np.random.default_rng(seed)
    params = {
        "router": rng.normal(size=(8, HIDDEN)),
        "experts_gate_up": rng.normal(size=(16, FF, HIDDEN)) / 6,
        "experts_down": rng.normal(size=(8, HIDDEN, FF)) / 8,
    }
    params |= {
        "router_bias": rng.normal(size=8),
        "experts_gate_up_bias": rng.normal(size=(16, FF)),
        "experts_down_bias": rng.normal(size=(8, HIDDEN)),
    }
    x = rng.normal(size=(tokens, HIDDEN))
    if skewed:
        x[: tokens * 3 // 4] = x[0] + 0.01 * x[: tokens * 3 // 4]
    if not biased:
        params = {name: array for name, array in params.items() if "bias" not in name}
    return jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), (params, x))


def by_definition(params, x):
    """Token by token, in float64; where there are biases, with normed weights and clamps."""
    params, x = jax.tree.map(lambda array: np.asarray(array, np.float64), (params, x))
    biased = "router_bias" in params
    out = np.zeros_like(x)
    for row, token in zip(out, x):
        logits = params["router"] @ token + params.get("router_bias", 0)
        weights = np.exp(logits - logits.max())
        chosen = np.argsort(-weights)[:2]
        weights /= weights[chosen].sum() if biased else weights.sum()
        for expert in chosen:
            both = slice(2 * expert, 2 * expert + 2)
            gate, up = params["experts_gate_up"][both] @ token
            if biased:
                gate, up = (gate, up) + params["experts_gate_up_bias"][both]
                gate, up = np.minimum(gate, 0.5), np.clip(up, -0.5, 0.5) + 1
            inner = gate / (1 + np.exp(-gate * (1.3 if biased else 1))) * up
            down = params["experts_down"][expert] @ inner
            row += weights[expert] * (
                down + params["experts_down_bias"][expert] if biased else down
            )
    return out


@pytest.mark.parametrize("moe_config", [MIXTURE, BIASED])
@pytest.mark.parametrize("tokens, skewed", [(8, False), (48, True), (700, True)])
def test_both_forms_are_the_sum_over_chosen_experts(moe_config, tokens, skewed):
    """A block of one token, of several, runs of many blocks; and the form of other devices."""
    params, x = mixture_of(tokens, skewed=skewed, biased=moe_config.biased)
    expected = by_definition(params, x)
    np.testing.assert_allclose(moe.mixture(moe_config, params, x), expected, atol=2e-5)
    weights, experts = moe.route(moe_config, params, x)
    runs = moe.sorted_choices(experts.reshape(-1), 8)
    own = moe.Experts(*(params.get(f"experts_{name}") for name in moe.Experts._fields))
    out = moe.by_ragged_dot(moe_config, own, x, weights, runs)
    np.testing.assert_allclose(out, expected, atol=2e-5)


@pytest.mark.parametrize("form", ["blocks", "ragged_dot", "int8"])
def test_padding_takes_no_expert(monkeypatch, form):
    """Rows are counted in the program, and those of padding give zeros."""
    params, x = mixture_of(len(REAL))
    if form == "ragged_dot":  # As `by_platform` takes on other devices.
        monkeypatch.setattr(moe, "by_blocks", moe.by_ragged_dot)
    if form == "int8":
        rows = {name: params[name].reshape(-1, params[name].shape[-1]) for name in EXPERTS}
        packed = {name: quantize(rows[name], FORMATS[form]) for name in EXPERTS}
        meant = {name: dequantize(packed[name]).reshape(params[name].shape) for name in EXPERTS}
        expected = by_definition(params | meant, x)
        params |= packed
    else:
        expected = by_definition(params, x)
    taken = recorded_runs(monkeypatch)

    @jax.jit
    def compute(params, x):
        with moe.real_tokens(jnp.asarray(REAL)) as counts:
            out = moe.mixture(MIXTURE, params, x)
        return out, taken.pop().sizes, *counts

    out, sizes, counts = compute(params, x)
    assert sizes.sum() == 2 * REAL.sum()
    np.testing.assert_array_equal(sizes, counts)
    np.testing.assert_allclose(out[REAL], expected[REAL], atol=2e-5)
    assert not out[~REAL].any()


def recorded_runs(monkeypatch):
    """The runs of every mixture that is traced."""
    runs, sort = [], moe.sorted_choices
    monkeypatch.setattr(moe, "sorted_choices", lambda *args: runs.append(sort(*args)) or runs[-1])
    return runs


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_packed_experts_are_those_they_mean(quantization):
    params, x = mixture_of(16)
    format = FORMATS[quantization]
    packed = {
        name: quantize(params[name].reshape(-1, params[name].shape[-1]), format) for name in EXPERTS
    }
    meant = {name: dequantize(packed[name]).reshape(params[name].shape) for name in EXPERTS}
    out = jax.jit(moe.mixture, static_argnums=0)(MIXTURE, params | packed, x)
    np.testing.assert_allclose(out, by_definition(params | meant, x), atol=2e-5)


def test_experts_are_packed_and_routers_are_not(model):
    specs = with_formats(model.family.param_specs(model.config), "int8", lambda _: None)
    sparse = specs["layers"][1]
    packed = {name for name, spec in sparse.items() if spec.format is not None}
    assert packed == {"qkv", "attn_out", "shared_gate_up", "shared_down", *EXPERTS}


@pytest.mark.parametrize("real", [4, 1])
def test_a_decode_computes_its_experts_and_no_others(monkeypatch, real):
    """Counted in the compiled program: products of one block, times the number of blocks; of the
    `real` tokens of a step that is padded to four."""
    tokens = 4
    params, x = mixture_of(tokens)
    taken = recorded_runs(monkeypatch)

    def compute(params, x, is_real):
        with moe.real_tokens(is_real):
            out = moe.mixture(MIXTURE, params, x)
        return out, moe.num_blocks(taken.pop(), tokens * 2).sum()

    arguments = params, x, jnp.arange(tokens) < real
    compiled = jax.jit(compute).lower(*arguments).compile()
    of_block = sum(
        2 * math.prod(map(int, shape.split(","))) * contracted
        for shape, contracted in products(compiled.as_text())
        if str(2 * FF) in shape.split(",") or contracted == FF
    )
    _, blocks = compiled(*arguments)
    active = real * 2 * 2 * (2 * FF * HIDDEN + HIDDEN * FF)
    assert 0 < of_block * blocks <= active


def products(hlo):
    """Shape and contracted size of every matrix product in a compiled program."""
    shapes = dict(re.findall(r"(%[\w.-]+) = \w+\[([\d,]*)\]", hlo))
    for shape, left, dim in re.findall(
        r"= \w+\[([\d,]*)\]\S* dot\((%[\w.-]+), .*lhs_contracting_dims=\{(\d+)\}", hlo
    ):
        yield shape, int(shapes[left].split(",")[int(dim)])


def test_experts_that_are_not_there(llama, model):
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts; leave it out"):
        engine_plan.decide(EngineConfig(model=llama.path, enable_expert_parallel=True))
