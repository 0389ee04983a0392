"""Rules that accept drafts: the distribution of what they leave, and Medusa's criterion."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive import combination

from jaxserve.sampling.acceptance import AcceptanceRule, Drafted, decide
from jaxserve.sampling.noise import exponentials
from jaxserve.sampling.vocabulary import padded

DRAWS, VOCAB = 200_000, 5
REJECTION = AcceptanceRule("rejection")


def seeds_of(count):
    """Seeds of as many sequences, uint32 [count, 2]."""
    return jnp.stack([jnp.full(count, 7, jnp.uint32), jnp.arange(count, dtype=jnp.uint32)], axis=1)


def distributions(seed, *shape):
    """Probabilities [*shape, padded vocab], some of them zero."""
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.full(VOCAB, 0.7), shape) * (rng.random((*shape, VOCAB)) > 0.2)
    weights[..., 0] += 0.05
    probs = weights / weights.sum(axis=-1, keepdims=True)
    missing = [(0, 0)] * len(shape) + [(0, padded(VOCAB) - VOCAB)]
    return jnp.asarray(np.pad(probs, missing), jnp.float32)


def drawn(probs, position):
    """Drafts int32 [draws] by the race that drafters run."""
    tokens = jnp.arange(probs.shape[1], dtype=jnp.int32)
    positions = jnp.full(len(probs), position, jnp.int32)
    return jnp.argmax(probs / exponentials(seeds_of(len(probs)), positions, tokens), axis=1)


def decided(target, draft, probs, position):
    """Tokens int32 [draws] by rejection, with drafts everywhere."""
    count = len(target)
    positions, sampled = jnp.full(count, position, jnp.int32), jnp.zeros(count, jnp.int32)
    weights = 3 * target  # They need not sum to 1.
    drafted = Drafted(draft.reshape(count, -1), probs)
    return decide(REJECTION, weights, sampled, drafted, seeds_of(count), positions, VOCAB)


def total_variation(tokens, probs):
    counts = np.bincount(np.asarray(tokens), minlength=probs.size)
    return np.abs(counts / len(tokens) - np.asarray(probs).reshape(-1)).sum() / 2


def several_drawn(probs, position, most):
    """As many different drafts int32 [draws, most], the most likely to win the race first."""
    tokens = jnp.arange(probs.shape[1], dtype=jnp.int32)
    positions = jnp.full(len(probs), position, jnp.int32)
    race = probs / exponentials(seeds_of(len(probs)), positions, tokens)
    return jax.lax.top_k(race, most)[1]


@jax.jit
def two_tokens(p_first, p_second, q_first, q_second):
    """Two tokens of every sequence, as numbers in base VOCAB, and whether the first draft was
    accepted.

    Where it was, the second draft of the same step follows it; otherwise another step drafts after
    the token in its place, with the same noise.
    """
    p, q = (jnp.broadcast_to(x, (DRAWS, x.size)) for x in (p_first, q_first))
    draft = drawn(q, 0)
    first = decided(p, draft, q, 0)
    p, q = p_second[first], q_second[first]
    return first * VOCAB + decided(p, drawn(q, 1), q, 1), first == draft


@pytest.mark.parametrize("seed", [0, combination(1)])
def test_rejection_leaves_the_distribution_of_every_continuation(seed):
    """Against all continuations, enumerated; and drafts are accepted as often as the rule says."""
    p_first, q_first = distributions(seed), distributions(seed + 10)
    p_second, q_second = distributions(seed + 20, VOCAB), distributions(seed + 30, VOCAB)
    tokens, kept = two_tokens(p_first, p_second, q_first, q_second)
    joint = p_first[:VOCAB, None] * p_second[:, :VOCAB]
    assert total_variation(tokens, joint) < 0.01
    overlap = float(jnp.minimum(p_first, q_first).sum())
    assert abs(float(kept.mean()) - overlap) < 0.01


@functools.partial(jax.jit, static_argnames=("branches", "drawn"))
def two_tokens_of_a_tree(p_first, p_second, q_first, q_second, branches, drawn):
    """As `two_tokens`, with several drafts of each token, `branches`; those of the second have the
    same distribution whatever the first is, as those of Medusa. Not `drawn`: they are certain."""
    p, q, following = (jnp.broadcast_to(x, (DRAWS, x.size)) for x in (p_first, q_first, q_second))
    drafts = several_drawn(q, 0, branches[0])
    first = decided(p, drafts, q if drawn else None, 0)
    second_drafts = several_drawn(following, 1, branches[1])
    second = decided(p_second[first], second_drafts, following if drawn else None, 1)
    return first * VOCAB + second, jnp.any(drafts == first[:, None], axis=1)


@pytest.mark.parametrize(
    ("branches", "drawn"),
    [((2, 3), True), combination((VOCAB, 2), True), combination((2, 3), False)],
    ids=["drawn", "all drawn", "certain"],
)
def test_rejection_leaves_the_distribution_with_trees(branches, drawn):
    """SpecInfer's rule, for drafts without replacement. The last ones may have been left out by a
    filter of the drafter (q is 0), and are certain then."""
    p_first, q_first = distributions(0), distributions(10)
    p_second, q_second = distributions(20, VOCAB), distributions(32)
    arguments = p_first, p_second, q_first, q_second
    tokens, kept = two_tokens_of_a_tree(*arguments, branches=branches, drawn=drawn)
    joint = p_first[:VOCAB, None] * p_second[:, :VOCAB]
    assert total_variation(tokens, joint) < 0.01
    if drawn:  # More often than the first draft alone.
        assert float(kept.mean()) > float(jnp.minimum(p_first, q_first).sum()) + 0.05


@pytest.mark.parametrize("known", [False, True], ids=["no distributions", "zeros"])
def test_a_draft_that_was_not_drawn_is_a_point_mass(known):
    each, p = 20_000, distributions(2)
    target = jnp.broadcast_to(p, (VOCAB * each, p.size))
    drafts = jnp.repeat(jnp.arange(VOCAB), each)
    tokens = jax.jit(decided)(target, drafts, jnp.zeros_like(target) if known else None, 4)
    for draft, some in enumerate(np.split(np.asarray(tokens), VOCAB)):
        assert total_variation(some, p[:VOCAB]) < 0.02
        assert abs(np.mean(some == draft) - p[draft]) < 0.02


def test_a_drafter_with_the_distribution_of_the_model_is_always_right():
    both = jnp.broadcast_to(p := distributions(1), (10_000, p.size))
    draft = jax.jit(drawn)(both, 3)
    np.testing.assert_array_equal(jax.jit(decided)(both, draft, both, 3), draft)


@pytest.mark.parametrize(("threshold", "alpha"), [(0.09, 0.3), (0.5, 1.0), (1.0, 0.2)])
def test_typical_keeps_what_is_likely_for_the_entropy(threshold, alpha):
    rule = AcceptanceRule("typical", threshold, alpha)
    probs = np.asarray(distributions(5, 64))
    entropy = -(probs * np.log(np.where(probs > 0, probs, 1))).sum(axis=1)
    bound = np.minimum(threshold, alpha * np.exp(-entropy))
    seeds, positions = seeds_of(64), jnp.zeros(64, jnp.int32)
    sampled = jnp.full(64, VOCAB - 1)
    outcomes = set()

    @jax.jit
    def by_rule(draft):
        drafted = Drafted(jnp.full((64, 1), draft), None)
        return decide(rule, jnp.asarray(probs), sampled, drafted, seeds, positions, VOCAB)

    for draft in range(VOCAB):
        tokens = by_rule(draft)
        kept = probs[:, draft] > bound
        np.testing.assert_array_equal(tokens, np.where(kept, draft, VOCAB - 1))
        outcomes |= set(kept.tolist())
    assert outcomes == {True, False}


def test_rows_without_a_draft_or_a_token_are_as_they_were():
    probs, sampled = distributions(5, 4), jnp.array([1, 2, -1, 3])
    drafted = Drafted(jnp.array([[-1], [-1], [0], [-1]]), probs)
    for rule in (REJECTION, AcceptanceRule("typical", 0.0, 0.0)):
        by_rule = jax.jit(functools.partial(decide, rule, probs, sampled, drafted, count=VOCAB))
        tokens = by_rule(seeds=seeds_of(4), positions=jnp.arange(4))
        np.testing.assert_array_equal(tokens, sampled)
