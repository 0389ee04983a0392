"""Sampling where each rank has a part of the vocabulary, against sampling on one device."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive import combination
from jax.sharding import PartitionSpec as P
from mesh_engines import on_mesh

from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.models import parallel
from jaxserve.sampling import (
    BY_TOKEN,
    SamplingState,
    abstract_state,
    admit,
    general,
    greedy,
    pack_admission,
    pack_rows,
    row_constants,
)
from jaxserve.sampling.processors import Processors
from jaxserve.sampling.rows import NUM_FIELDS
from jaxserve.structured.bitmask import mask_words
from sharding_rules import make_mesh

pytestmark = pytest.mark.meshes

SLOTS = 10
ROW = P(None, parallel.VOCAB)
MASKED = SamplingParams(structured_outputs={"json_object": True}, temperature=1.5, logprobs=2)
PARAMS = [
    SamplingParams(temperature=0.0, logprobs=20),
    SamplingParams(temperature=1.3, logprobs=3),
    SamplingParams(temperature=0.8, top_k=40),
    SamplingParams(temperature=2.0, top_p=0.9, logprobs=0),
    SamplingParams(temperature=1.7, top_k=500, top_p=0.95, min_p=0.001),
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, logit_bias={3: 50.0}, bad_words=["w"], min_tokens=5),
    SamplingParams(temperature=1.1, allowed_token_ids=[0, 5, 11, 50, 54]),
    MASKED,
    SamplingParams(temperature=1.2, extra_args={"ranked": 0.5}, logit_bias={7: 3.0}),
]


def ranked(logits, number):
    """Each logit with a part of its neighbour's: a rank's own part is not enough."""
    return logits + number * jnp.roll(logits, 1)


def _specs(tree):
    if isinstance(tree, SamplingState):
        return SamplingState(
            **{name: ROW if name in BY_TOKEN else P() for name in tree.__dataclass_fields__}
        )
    return jax.tree.map(lambda _: P(), tree)


def sampled_on_a_mesh_as_on_one_device(mesh_name: str, vocab: int) -> None:
    tensor, stage = (4, 1) if "PP" not in mesh_name else (2, 2)
    ranks, rows = tensor * stage, len(PARAMS)
    mesh = make_mesh(tensor=tensor, stage=stage, devices=jax.devices()[:ranks])
    rng = np.random.default_rng(vocab)
    logits = (rng.normal(size=(vocab, rows)) * 3).astype(np.float32)
    logits[:, 0] = np.round(logits[:, 0])  # Equals, of which the lowest id is wanted.
    words = [(7,), (3, 4)]
    states = [
        jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract_state(SLOTS, vocab, n))
        for n in (1, ranks)
    ]

    count = -(-vocab // ranks)
    padded = np.full((ranks * count, rows), -np.inf, np.float32)
    padded[:vocab] = logits
    logits, padded = logits.T, padded.T
    over_mesh = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    processors = Processors.of([ranked], vocab)
    general_ = functools.partial(general, processors=processors)
    in_specs = (ROW, _specs(states[1]), P(), P())
    out_specs = (P(), _specs(states[1]))
    on_ranks = jax.jit(over_mesh(general_, in_specs=in_specs, out_specs=out_specs))
    admit_on_ranks = jax.jit(
        over_mesh(admit, in_specs=(_specs(states[1]), P(), P()), out_specs=_specs(states[1]))
    )
    greedy_on_ranks = jax.jit(over_mesh(greedy, in_specs=ROW, out_specs=P()))
    np.testing.assert_array_equal(greedy_on_ranks(padded), jax.jit(greedy)(logits))

    past = rng.integers(0, vocab, 30).tolist()
    for slot, params in enumerate(PARAMS):
        bad = words if params.bad_words else []
        for place, (run, n) in enumerate(((jax.jit(admit), 1), (admit_on_ranks, ranks))):
            packed = pack_admission(
                params, vocab, past[:20], past[20:], eos_token_ids=[2], bad_word_ids=bad, ranks=n
            )
            states[place] = run(states[place], np.int32(slot), packed)

    names = processors.names
    constants = [
        row_constants(p, 5, multi_token_bad_words=bool(p.bad_words), processors=names)
        for p in PARAMS
    ]
    allowed = rng.random((rows, mask_words(vocab) * 32)) < 0.3
    masks = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    one = jax.jit(general_)
    for position in range(12):
        meta = pack_rows(constants, range(rows), [position] * rows, rows, SLOTS, len(names))
        (expected, states[0]), (output, states[1]) = (
            run(values, state, meta, masks)
            for run, values, state in zip((one, on_ranks), (logits, padded), states)
        )
        np.testing.assert_array_equal(output.token_ids, expected.token_ids)
        for name in ("ranks", "top_ids"):
            np.testing.assert_array_equal(
                getattr(output.logprobs, name), getattr(expected.logprobs, name)
            )
        for name in ("logprobs", "top_logprobs"):
            np.testing.assert_allclose(
                getattr(output.logprobs, name), getattr(expected.logprobs, name), atol=1e-5
            )
    for name in states[0].__dataclass_fields__:
        alone, parts = (np.asarray(getattr(state, name)) for state in states)
        if name in BY_TOKEN:
            parts = parts.reshape(len(parts), ranks, -1)[:, :, :count]
            alone, parts = alone[:, :vocab], parts.reshape(len(parts), -1)[:, :vocab]
        np.testing.assert_array_equal(parts[:SLOTS], alone[:SLOTS])

    # Ranks exchange candidates, 64 cells of 64 tokens, where the vocabulary is larger than that,
    # unless there are logits processors.
    plain = jax.jit(over_mesh(general, in_specs=in_specs, out_specs=out_specs))
    program = plain.lower(padded, states[1], meta[:, :NUM_FIELDS], masks).compile().as_text()
    gathered = re.findall(r"= \w+\[\d+,(\d+)\]\S* all-gather\(", program)
    assert gathered and all(int(width) <= min(64 * 64, ranks * (count + 64)) for width in gathered)


@pytest.mark.parametrize(
    ("mesh", "vocab"),
    [
        ("TP4", 1500),
        combination("TP4", 49_152),
        ("TP2 PP2", 55),
        combination("TP4", 55),
        combination("TP2 PP2", 1500),
        combination("TP2 PP2", 49_152),
    ],
)
def test_parts_of_a_vocabulary_sample_as_the_whole(mesh, vocab):
    on_mesh(mesh, sampled_on_a_mesh_as_on_one_device, vocab)
