"""SmolLM2 on meshes of virtual devices, and on two hosts: nine heads, three KV heads, 49,152
tokens."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive import combination, combinations_but, combinations_of
from golden_prompts import check_golden, check_tokens, golden_prompts, logits_before, shortfalls
from launched import Launched
from mesh_engines import on_mesh
from mesh_workload import check_same
from real_engines import GREEDY, MESH_PROMPTS, MESH_TOKENS, answer

from jaxserve.models.loading.checkpoint import open_checkpoint

pytestmark = pytest.mark.real_model

MESHES = ("TP2", "TP3", "PP2", "CP2", "TP2 PP2 CP2")
OPTIMISED = "TP2"
"""Runs the programs that users run; those of the others are compiled in a third of the time."""
MOVED = ("code_c", "sentence")
STEPS_BEFORE_THE_MOVE = 8


@pytest.fixture(scope="module")
def answers(smollm2_path, tmp_path_factory):
    """What an engine on a mesh answers, in a process of its own; "" is one device."""
    directory, made = tmp_path_factory.mktemp("answers"), {}

    def get(mesh, dtype, snapshot=None):
        if (mesh, dtype) not in made:
            target = directory / f"{mesh} {dtype}"
            optimised = mesh == OPTIMISED and dtype == "float32"
            on_mesh(mesh, answer, smollm2_path, target, dtype, snapshot, optimised=optimised)
            made[mesh, dtype] = pickle.loads(target.read_bytes())
        return made[mesh, dtype]

    return get


@pytest.fixture(scope="module")
def snapshot(session_llm, tmp_path_factory):
    """Two requests of an engine on one device in the middle of generation."""
    directory = tmp_path_factory.mktemp("snapshot")
    streams = [
        session_llm.stream({"prompt_token_ids": entry.prompt_token_ids}, GREEDY)
        for entry in golden_prompts(*MOVED)
    ]
    for _ in range(STEPS_BEFORE_THE_MOVE):
        session_llm.engine.step()
    for stream in streams:
        assert 0 < len(stream.request.sequence_outputs[0].seq.output_token_ids) < MESH_TOKENS
    session_llm.snapshot(directory)
    for stream in streams:
        stream.close()
    return directory


@pytest.mark.parametrize("mesh", combinations_of(MESHES, "TP3", "PP2"))
def test_a_mesh_answers_as_one_device(answers, snapshot, mesh):
    """Greedy as transformers; what is sampled, scored or has a grammar, as one device; what one
    device has begun, as if it had ended it."""
    ours, alone = answers(mesh, "float32", snapshot), answers("", "float32")
    check_golden(golden_prompts(*MESH_PROMPTS), ours["greedy"])
    check_golden(golden_prompts(*MESH_PROMPTS), alone["greedy"])
    check_same(ours["sampled"], alone["sampled"])
    for entry, output in zip(golden_prompts(*MOVED), ours["moved"], strict=True):
        check_tokens(entry, output.outputs[0].token_ids, whole=False)
        assert len(output.outputs[0].token_ids) == MESH_TOKENS


# bfloat16

ROUNDING = 2.0**-8
"""The largest relative error of one rounding to bfloat16, whose significand has eight bits."""
DEVIATIONS = 4
"""Standard deviations of the error that a margin has room for."""


def bfloat16_margins(logits: np.ndarray, layers: int) -> np.ndarray:
    """By how much the most likely token in bfloat16 may fall short of the best in exact arithmetic,
    float [tokens].

    The residual stream is rounded twice a layer, after attention and after the MLP, and what these
    two add to it has been rounded about as often and is about as large. So 4 x layers roundings,
    each uniform and hence 1/sqrt(3) of ROUNDING in standard deviation, add up as a random walk to
    a relative error e of the last hidden state. In a direction that no logit prefers, it changes
    each logit by e x the standard deviation of the logits, and the difference of two by sqrt(2) x
    as much.
    """
    relative = ROUNDING / np.sqrt(3) * np.sqrt(4 * layers)
    return DEVIATIONS * np.sqrt(2) * relative * logits.std(axis=1)


@pytest.fixture(scope="module")
def in_bfloat16(smollm2):
    """The model that an engine in bfloat16 loads, for an oracle that rounds no further."""
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(jnp.float32), smollm2.params)
    return dataclasses.replace(smollm2, params=params)


def check_most_likely(margins: np.ndarray, logits: np.ndarray, token_ids: list[int]) -> None:
    """Each token is the most likely by the oracle's logits, or falls short by no more than rounding
    accounts for."""
    shares = shortfalls(logits, token_ids) / margins
    assert shares.max() <= 1, f"tokens fall short by {shares.round(2)} of what rounding allows"


def check_scores(
    margins: np.ndarray, logits: np.ndarray, token_ids: list[int], scores: Sequence[float]
) -> None:
    """The log probabilities `scores` of the tokens are the oracle's within rounding."""
    expected = log_softmax(logits)[np.arange(len(logits)), token_ids]
    shares = np.abs(np.asarray(scores) - expected) / margins
    assert shares.max() <= 1, f"scores are off by {shares.round(2)} of what rounding allows"


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(jnp.asarray(logits), axis=1))


@pytest.mark.parametrize("mesh", ["", *combinations_but(MESHES, "TP2 PP2 CP2")])
def test_bfloat16_takes_the_most_likely_tokens(answers, in_bfloat16, mesh):
    """With the oracle's log probabilities, within rounding; and what differs from one device
    differs first where rounding can decide."""
    ours, alone = (answers(name, "bfloat16")["greedy"] for name in (mesh, ""))
    for output, other in zip(ours, alone, strict=True):
        (completion,), others = output.outputs, list(other.outputs[0].token_ids)
        tokens = list(completion.token_ids)
        logits = logits_before(in_bfloat16, output.prompt_token_ids, tokens)
        margins = bfloat16_margins(logits, in_bfloat16.config.num_layers)
        scores = [entry[token].logprob for entry, token in zip(completion.logprobs, tokens)]
        check_most_likely(margins, logits, tokens)
        check_scores(margins, logits, tokens, scores)
        pairs = zip(tokens, others)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if tokens != others:
            until = slice(same + 1)
            check_most_likely(margins[until], logits[until], others[until])


def without_a_layer(params):
    """The middle layer adds nothing."""
    layers = list(params["layers"])
    place = len(layers) // 2
    silent = {name: 0 * layers[place][name] for name in ("attn_out", "down")}
    layers[place] = layers[place] | silent
    return params | {"layers": layers}


def with_another_attention_scale(params):
    """Scores half as large, by queries half as long."""
    scale = jnp.ones(params["layers"][0]["qkv"].shape[1]).at[:-2].set(0.5)[None, :, None, None]
    layers = [layer | {"qkv": layer["qkv"] * scale} for layer in params["layers"]]
    return params | {"layers": layers}


@pytest.mark.parametrize("broken", [without_a_layer, combination(with_another_attention_scale)])
def test_the_margin_of_bfloat16_finds_a_broken_model(in_bfloat16, broken):
    """Or else the test above would prove less than it says: on every prompt, by the log
    probabilities of the golden tokens."""
    other = dataclasses.replace(in_bfloat16, params=broken(in_bfloat16.params))
    for entry in golden_prompts(*MESH_PROMPTS[1:4]):
        token_ids = entry.output_token_ids[:MESH_TOKENS]
        logits, wrong = (
            logits_before(model, entry.prompt_token_ids, token_ids)
            for model in (in_bfloat16, other)
        )
        margins = bfloat16_margins(logits, in_bfloat16.config.num_layers)
        scores = log_softmax(wrong)[np.arange(len(wrong)), token_ids]
        with pytest.raises(AssertionError, match="scores are off"):
            check_scores(margins, logits, token_ids, scores)


# Two hosts


def test_two_hosts_answer_as_transformers_does(smollm2_path, tmp_path):
    """`jaxserve launch` with the command that a user types."""
    (entry,) = golden_prompts("sentence")
    job = Launched(
        *("--hosts=2", "--devices-per-host=1", "--", "generate", entry.prompt, "--raw"),
        *("--model", smollm2_path, "--tensor-parallel-size=2", f"--max-tokens={MESH_TOKENS}"),
        *("--max-model-len=128", "--max-num-batched-tokens=33", "--page-size=16"),
        cwd=tmp_path,
    )
    try:
        status, stdout = job.end(timeout_s=500)
    finally:
        job.kill()
    assert status == 0, job.stderr
    tokenizer = open_checkpoint(smollm2_path).tokenizer()
    assert stdout.strip() == tokenizer.decode(entry.output_token_ids[:MESH_TOKENS]).strip()
