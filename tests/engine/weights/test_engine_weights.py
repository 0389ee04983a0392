"""Weights replaced while the engine runs: whose tokens are whose, and what may not change."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kv_engines import bytes_of, settle
from tiny_engines import LONGEST, Arrival, TinyModel, assert_idle, drive, generate

from jaxserve.core.errors import (
    ConfigError,
    EngineAsleepError,
    ModelError,
    OutOfMemoryError,
    SnapshotError,
    WeightsError,
)
from jaxserve.core.requests.outputs import WeightsRun
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig
from jaxserve.runtime.live_weights import LiveWeights
from jaxserve.runtime.startup.engine_plan import plan_engine
from jaxserve.runtime.state_memory import StateMemory

GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
SCORED = dataclasses.replace(GREEDY, logprobs=0, prompt_logprobs=0, max_tokens=6)


@pytest.fixture(scope="module")
def trained(llama) -> TinyModel:
    """The tiny Llama after some training."""
    keys = iter(jax.random.split(jax.random.key(8), 1000))
    step = {1: 0.3, 2: 0.02}

    def moved(x):
        return x + step.get(x.ndim, 0.02) * jax.random.normal(next(keys), x.shape, x.dtype)

    return dataclasses.replace(llama, params=jax.tree.map(moved, llama.params))


@pytest.fixture(scope="module")
def live(llama):
    """An engine with a tier below the device."""
    with llama.load(debug_kv=True, host_kv_bytes=bytes_of(llama, 20)) as llm:
        yield llm
    assert llm.weights_version > 0, "a closed engine tells it too"


@pytest.fixture
def llm(live, llama):
    """The engine with the weights of the checkpoint, and idle."""
    live.wake_up()
    live.update_weights(llama.params)
    yield live
    live.wake_up()
    assert_idle(live.engine)


def weights_and_pages(llm):
    state = llm.engine._runner._state
    return [
        array for array in jax.tree.leaves((state.params, state.kv)) if isinstance(array, jax.Array)
    ]


def test_the_new_weights_make_the_next_tokens_and_nothing_is_compiled(
    llm, llama, trained, compiled
):
    jax.block_until_ready(trained.params)
    llama.check_greedy(generate(llm, llama.prompts[9], GREEDY))
    before = weights_and_pages(llm)
    compiled.clear()
    version = llm.update_weights(trained.params)
    assert compiled == []
    output = generate(llm, llama.prompts[9], GREEDY)
    trained.check_greedy(output)
    assert output.metrics.cached_tokens == 0, "pages of the old weights were found"
    assert output.outputs[0].weights == (WeightsRun(version, LONGEST),)
    replaced = [array for array in before if array.is_deleted()]
    assert len(replaced) >= len(jax.tree.leaves(llama.params)), "the old weights are still held"
    # The trainer's arrays are its own: donating them afterwards is safe.
    copies = jax.tree.map(lambda x: x + 0, trained.params)
    llm.update_weights(copies)
    jax.tree.map(lambda x: x.delete(), copies)
    trained.check_greedy(generate(llm, llama.prompts[9], GREEDY))


@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "seeded"])
def test_a_request_in_flight_goes_on_as_if_its_tokens_had_been_a_prompt(
    llm, llama, trained, seeded
):
    """Each token is of one version, whose distribution it has given all tokens before."""
    params = dataclasses.replace(GREEDY, temperature=0.7 if seeded else 0, seed=5, logprobs=0)
    stream = llm.stream(llama.prompts[7], params)
    running = llm.stream(llama.prompts[10], params)
    begun = [next(stream).token_ids[0] for _ in range(5)]
    old = llm.engine.weights.version
    new = llm.update_weights(trained.params)
    outputs = [stream.result(), running.result()]
    for output, prompt in zip(outputs, (llama.prompts[7], llama.prompts[10])):
        (choice,) = output.outputs
        (first, count), (second, rest) = choice.weights
        assert (first, second) == (old, new) and count + rest == LONGEST
        tokens = prompt + list(choice.token_ids)
        for place, entry in enumerate(choice.logprobs):
            model = llama if place < count else trained
            position = len(prompt) + place
            expected = model.logprobs(tokens)[position - 1, tokens[position]]
            assert abs(entry[tokens[position]].logprob - expected) < 2e-3, place
    assert list(outputs[0].outputs[0].token_ids[:5]) == begun


def test_a_prompt_in_flight_is_scored_by_the_new_weights_alone(llm, llama, trained):
    stream = llm.stream(llama.prompts[11], SCORED)
    for _ in range(2):
        llm.engine.step()  # The first of its four chunks has been computed.
    llm.update_weights(trained.params)
    output = stream.result()
    expected = trained.logprobs(llama.prompts[11])
    for position in range(1, len(llama.prompts[11])):
        token = llama.prompts[11][position]
        got = output.prompt_logprobs[position][token].logprob
        assert abs(got - expected[position - 1, token]) < 2e-3, position
    trained.check_greedy(output)


def test_no_tier_keeps_pages_of_the_old_weights(llm, llama, trained):
    for prompt in llama.prompts:  # More than the device holds: some go to host memory.
        generate(llm, prompt, GREEDY)
    llm.update_weights(trained.params)
    settle(llm.engine)  # A copy in flight holds its pages until it has landed.
    assert all(usage.num_used == 0 for usage in llm.engine.kv.tiers.values())
    for output in llm.generate(llama.prompts, GREEDY, use_tqdm=False):
        trained.check_greedy(output)


def test_arrays_are_taken_by_their_names(llm, llama, trained):
    """`jax.tree.leaves` orders an OrderedDict by insertion, and names of layers as text."""

    def backwards(tree):
        return OrderedDict((name, tree[name]) for name in sorted(tree, reverse=True))

    layers = {str(place): backwards(layer) for place, layer in enumerate(trained.params["layers"])}
    llm.update_weights(backwards({**trained.params, "layers": backwards(layers)}))
    trained.check_greedy(generate(llm, llama.prompts[5], GREEDY))


def test_weights_of_a_checkpoint(llm, llama, tmp_path, compiled):
    generated = generate(llm, llama.prompts[4], GREEDY)
    version = llm.update_weights(jax.tree.map(jnp.zeros_like, llama.params))
    assert llm.update_weights(llama.path) == version + 1
    again = generate(llm, llama.prompts[4], GREEDY)
    assert again.outputs[0].token_ids == generated.outputs[0].token_ids


def wrong(params, change):
    params = {**params, "layers": [dict(layer) for layer in params["layers"]]}
    change(params)
    return params


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p["layers"][1].pop("down"), r"layers\.1\.down is missing"),
        (
            lambda p: p["layers"][0].update(qkv=p["layers"][0]["qkv"][:1]),
            r"layers\.0\.qkv has shape \[1, .* it must be \[2, ",
        ),
        (
            lambda p: p.update(final_norm=p["final_norm"].astype(jnp.bfloat16)),
            "final_norm is bfloat16 and the engine's weights are float32",
        ),
        (lambda p: p.update(bias=p["final_norm"]), "bias is not a parameter"),
        (lambda p: p.update(embed=3.0), "embed is a float"),
    ],
)
def test_a_pytree_that_differs_is_refused_by_its_first_leaf(llm, llama, change, message):
    version = llm.engine.weights.version
    with pytest.raises(WeightsError, match=message):
        llm.update_weights(wrong(llama.params, change))
    assert llm.engine.weights.version == version
    llama.check_greedy(generate(llm, llama.prompts[5], GREEDY))


def test_what_is_no_pytree_of_arrays_is_refused(llm, llama, tmp_path):
    deleted = jax.tree.map(lambda x: x + 0, llama.params)
    deleted["layers"][1]["gate_up"].delete()
    with pytest.raises(WeightsError, match=r"layers\.1\.gate_up was deleted"):
        llm.update_weights(deleted)
    with pytest.raises(WeightsError, match="params is a list"):
        llm.update_weights([1, 2])
    with pytest.raises(ModelError, match="there is no file"):
        llm.update_weights(tmp_path / "absent")
    other = TinyModel.write_member(tmp_path, "qwen3")
    with pytest.raises(WeightsError, match="has architecture 'Qwen3ForCausalLM', and the served"):
        llm.update_weights(other.path)
    llama.check_greedy(generate(llm, llama.prompts[5], GREEDY))


def test_a_truncated_checkpoint_leaves_the_old_weights_serving(llm, llama, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in llama.path.iterdir():
        content = file.read_bytes()
        (broken / file.name).write_bytes(content[:-64] if "safetensors" in file.name else content)
    with pytest.raises(ModelError):
        llm.update_weights(broken)
    llama.check_greedy(generate(llm, llama.prompts[5], GREEDY))


def test_quantized_weights_are_refused_by_name(llama):
    config = EngineConfig.of(model=llama.path, quantization="int8", **llama.settings())
    with pytest.raises(WeightsError, match="quantization is 'int8'"):
        LiveWeights(plan_engine(config), memory=None).staged(llama.params)


def test_replaced_weights_are_in_no_snapshot(llm, llama, tmp_path):
    with pytest.raises(SnapshotError, match="update_weights has replaced"):
        llm.snapshot(tmp_path)


# Sleep


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_the_memory_back_and_requests_go_on_afterwards(llm, llama, compiled, level):
    llm.update_weights(llama.path)
    undisturbed = generate(llm, llama.prompts[8], GREEDY)
    stream = llm.stream(llama.prompts[8], GREEDY)
    next(stream)
    held = weights_and_pages(llm)
    on_device = sum(array.nbytes for array in held)
    planned = llm.plan().memory
    assert on_device == planned.weights_bytes + planned.kv_bytes
    compiled.clear()
    llm.sleep(level)
    assert llm.is_sleeping
    assert all(array.is_deleted() for array in held)
    with pytest.raises(EngineAsleepError, match="call wake_up"):
        llm.generate(llama.prompts[0], GREEDY, use_tqdm=False)
    llm.sleep(level)
    llm.wake_up()
    assert not llm.is_sleeping
    assert sum(array.nbytes for array in weights_and_pages(llm)) == on_device
    output = stream.result()
    assert compiled == []
    assert output.outputs[0].token_ids == undisturbed.outputs[0].token_ids
    drive(llm.engine, [Arrival(prompt, GREEDY) for prompt in llama.prompts])


def test_weights_arrive_while_the_engine_sleeps(llm, llama, trained):
    llm.sleep(2)
    with pytest.raises(WeightsError, match="came from arrays"):
        llm.wake_up()
    assert llm.is_sleeping
    llm.update_weights(trained.params)
    assert llm.is_sleeping, "there are no pages yet"
    llm.wake_up(["kv_cache"])
    trained.check_greedy(generate(llm, llama.prompts[6], GREEDY))


def test_weights_wake_up_alone(llm, llama):
    llm.sleep()
    llm.wake_up(["weights"])
    assert llm.is_sleeping
    llm.wake_up()
    llama.check_greedy(generate(llm, llama.prompts[6], GREEDY))
    for call in (lambda: llm.sleep(3), lambda: llm.wake_up(["weight"]), lambda: llm.wake_up(5)):
        with pytest.raises(ConfigError, match=r"level is 3|tags names 'weight'|tags is 5"):
            call()


def test_a_deeper_sleep_drops_the_copy_in_host_memory(llm, llama):
    llm.update_weights(llama.path)
    llm.sleep(1)
    state = llm.engine._runner._state
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(state.params))
    llm.sleep(2)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state.params))
    llm.wake_up()
    llama.check_greedy(generate(llm, llama.prompts[6], GREEDY))


@pytest.mark.parametrize("missing", ["restore_params", "allocate_pages"])
def test_an_engine_that_finds_no_memory_sleeps_on(llm, llama, monkeypatch, missing):
    def exhausted(memory):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 byte.")

    llm.sleep()
    with monkeypatch.context() as patch:
        patch.setattr(StateMemory, missing, exhausted)
        with pytest.raises(OutOfMemoryError, match="call wake_up again"):
            llm.wake_up()
        assert llm.is_sleeping
    llm.wake_up()
    llama.check_greedy(generate(llm, llama.prompts[6], GREEDY))
