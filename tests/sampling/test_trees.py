"""Trees of drafts, their accepted paths and their best guesses, against the definitions."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling_reference as reference
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.draft_tree import parents, parse_tree
from jaxserve.sampling import NO_TOKEN, candidates, general, most_likely, pack_rows, row_constants
from jaxserve.sampling.processors import Processors
from jaxserve.sampling.speculation import (
    NO_DRAFT,
    abstract_speculation,
    accepted_nodes,
    path_tokens,
    verify,
)
from jaxserve.sampling.trees import trees_of
from jaxserve.structured.bitmask import mask_words

DEPTH, NODES, CONTEXT, VOCAB = 3, 8, 24, 70
FULL = tuple(path for size in (1, 2, 3) for path in itertools.product(range(3), repeat=size))

run_verify = jax.jit(verify, static_argnums=(0, 1))
run_trees = jax.jit(trees_of, static_argnums=1)


@st.composite
def tree_paths(draw):
    """Paths of a tree of NODES drafts."""
    paths = [()]
    while len(paths) <= NODES:
        free = sorted(path for path in FULL if path[:-1] in paths and path not in paths)
        paths.append(draw(st.sampled_from(free)))
    return parse_tree([list(path) for path in paths[1:]])


@settings(max_examples=30, deadline=None)
@given(tree=tree_paths())
def test_the_nodes_on_the_way_to_a_draft(tree):
    found = run_trees(jnp.asarray([parents(tree)]), DEPTH)
    paths = [(), *tree]
    for node, path in enumerate(paths):
        on_way = [paths.index(path[:size]) for size in range(len(path) + 1)]
        assert found.depths[0, node] == len(path)
        padded = on_way + [node] * (DEPTH - len(path))
        assert found.paths[0, node].tolist() == padded
        assert np.flatnonzero(found.mask[0, node]).tolist() == sorted(on_way)


@settings(max_examples=60, deadline=None)
@given(
    tree=tree_paths(),
    tokens=st.lists(st.integers(0, 2), min_size=1 + NODES, max_size=1 + NODES),
    order=st.permutations(range(3)),
    count=st.integers(1, 1 + NODES),
)
def test_the_tokens_that_are_kept_are_those_of_a_walk(tree, tokens, order, count):
    """Down from the newest token, to the draft that equals the token sampled there, while one does.
    Drafts beyond `count` were not computed; one guess in four is none."""
    drafts = [order[path[-1]] if sum(path) % 4 != 3 else NO_DRAFT for path in tree]
    shapes = abstract_speculation(1, CONTEXT, NODES, tree_depth=DEPTH)
    state = jax.tree.map(lambda shape: jnp.zeros(shape.shape, jnp.int32), shapes)
    state = state._replace(
        drafts=state.drafts.at[0].set(jnp.asarray(drafts)),
        parents=state.parents.at[0].set(jnp.asarray(parents(tree))),
        lengths=state.lengths.at[0].set(5),
    )
    walk, paths = [0], [(), *tree]
    while True:
        at = paths[walk[-1]]
        followers = [
            node
            for node, path in enumerate(paths)
            if path[:-1] == at and path and node < count and drafts[node - 1] == tokens[walk[-1]]
        ]
        if not followers:
            break
        walk += followers
    sampled, slots = jnp.asarray([*tokens, 7]), jnp.array([0])
    after, newest, acceptance = run_verify(
        1 + NODES, DEPTH, state, jnp.zeros(2, jnp.int32), sampled, slots, jnp.array([count])
    )
    kept = [tokens[node] for node in walk]
    assert acceptance.num_tokens.tolist() == [len(walk)]
    assert acceptance.path[0, : len(walk)].tolist() == walk
    assert acceptance.num_drafts.tolist() == [sum(d >= 0 for d in drafts[: count - 1])]
    assert newest[0] == kept[-1] and after.lengths[0] == 5 + len(kept)
    assert after.history[0, 5 : 5 + len(kept)].tolist() == kept

    nodes = jnp.arange(1 + NODES)
    *of_nodes, depths = path_tokens(state, DEPTH, jnp.zeros_like(nodes), nodes)
    accepted_of_all = accepted_nodes(*of_nodes, depths, nodes, jnp.asarray(tokens))
    if count > NODES:
        assert np.flatnonzero(accepted_of_all).tolist() == sorted(walk)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 999),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 1, 3]),
    num=st.integers(1, 5),
)
def test_the_best_drafts_begin_with_what_is_sampled(seed, temperature, top_k, num):
    """As if it were sampled without those before: a token that is banned makes way for the next."""
    logits = np.random.default_rng(seed).normal(size=(1, VOCAB)).astype(np.float32) * 3
    params = SamplingParams(temperature=temperature, top_k=top_k, seed=seed)
    meta = pack_rows([row_constants(params, seed)], [1], [4], 1, 1)
    state = reference.empty_state(1, VOCAB)
    masks = np.zeros((1, mask_words(VOCAB)), np.int32)
    drafts = run_candidates(logits, state, meta, num)[0][0].tolist()
    assert len(set(drafts)) == num
    kept = num if not temperature or not top_k else min(num, top_k)
    for draft in drafts[:kept]:
        output, _ = run_general(logits, state, meta, masks)
        assert output.token_ids[0] == draft
        if top_k:  # Another token would come among the most likely.
            break
        logits[0, draft] = -np.inf
    if not temperature:
        logits = np.random.default_rng(seed).normal(size=(1, VOCAB)).astype(np.float32) * 3
        assert most_likely(jnp.asarray(logits), num)[0][0].tolist() == drafts


def run_candidates(logits, state, meta, num):
    processors = Processors((), (), VOCAB)
    return _candidates(logits, state, meta, processors, num)


_candidates = jax.jit(candidates, static_argnums=(3, 4))
run_general = jax.jit(general)


def test_no_more_drafts_than_tokens_are_allowed():
    logits = np.full((2, VOCAB), -np.inf, np.float32)
    logits[0, [3, 9]] = 1.0, 2.0
    logits[1] = np.nan
    ids, logs = most_likely(jnp.asarray(logits), 3)
    assert ids.tolist() == [[9, 3, NO_TOKEN], [NO_TOKEN] * 3]
    assert np.exp(logs[0]) == pytest.approx([1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1)), 0])
