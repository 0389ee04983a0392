"""Speculative decoding on the device: acceptance of drafts (runtime/proposers makes them).

A decode row computes its newest token and its drafts. Each of these tokens samples the next one as
it would without drafts, with the noise of its own position; a draft is accepted while it equals the
token sampled before it. So the output equals that of decoding without drafts. The host learns how
many drafts were accepted only when it reads the step: lengths and positions stay on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.sampling.trees import accepted_path, trees_of

NO_DRAFT = -1
POOL_SIZE = 256
"""N-grams that lookahead decoding keeps of a sequence."""


class Trajectories(NamedTuple):
    """Per-slot arrays int32 of lookahead decoding with n-grams of n tokens.

    `paths` [slots + 1, k, n - 1]: for each draft the tokens that it followed, step after step, and
    the draft itself; NO_DRAFT before the first. `pool` [slots + 1, n-grams, n]: the newest first,
    NO_DRAFT where there is none.
    """

    paths: jax.Array
    pool: jax.Array


class SpeculationState(NamedTuple):
    """Per-slot arrays, int32 but for `hidden`; the last row is for padding.

    `history` [slots + 1, context limit + width]: tokens by position, of which the first `lengths`
    [slots + 1] are valid. `drafts` [slots + 1, k]: guesses of the next ones, or NO_DRAFT; those of
    a step's decodes are made before it runs. `hidden` [slots + 1, hidden], for drafters that guess
    from it: the hidden state that the newest token was sampled from, or the one that the drafter
    expects after it. `gained` [slots + 1], for drafters that follow the model's hidden states: the
    tokens that the last step added. `parents` [slots + 1, k], where drafts are a tree: the node
    that each follows (sampling/trees.py); `path` [slots + 1, 1 + depth], for drafters of trees that
    follow the model's hidden states: the nodes after which the last step sampled what it added.
    `trajectories`: for lookahead decoding. `probs` float32 [slots + 1, k, padded vocab], where
    acceptance needs them: the distribution that each draft was drawn from, of this rank's tokens;
    zeros for a draft that was not drawn. Of trees [slots + 1, depth, padded vocab]: those of a
    depth were drawn from one, without replacement.
    """

    history: jax.Array
    lengths: jax.Array
    drafts: jax.Array
    hidden: jax.Array | None = None
    gained: jax.Array | None = None
    parents: jax.Array | None = None
    path: jax.Array | None = None
    trajectories: Trajectories | None = None
    probs: jax.Array | None = None


class StepDrafts(NamedTuple):
    """The drafts of each row of a step, int32 [rows, width - 1], NO_DRAFT for those that it did not
    verify, and the node that each follows (sampling/trees.py)."""

    token_ids: jax.Array
    parents: jax.Array


class Acceptance(NamedTuple):
    """For each row of a step int32 [rows]: tokens that it gained, and drafts that it verified. Of
    trees also the nodes [rows, 1 + depth] after which those tokens were sampled, one by one. Of
    steps with drafts these themselves, which stay on the device where no log keeps them."""

    num_tokens: jax.Array
    num_drafts: jax.Array
    path: jax.Array | None = None
    drafts: StepDrafts | None = None


def abstract_speculation(
    num_slots: int,
    max_len: int,
    num_drafts: int,
    hidden: jax.ShapeDtypeStruct | None = None,
    *,
    gained: bool = False,
    tree_depth: int = 0,
    ngram_size: int | None = None,
) -> SpeculationState:
    """Shapes of the state of `num_slots` slots and one for padding; `hidden` is the shape of one
    slot's hidden state, if it is kept, `gained` says whether those tokens are counted, and drafts
    are trees of at most `tree_depth`, or for 0 chains. With an `ngram_size` there are
    trajectories."""
    rows = num_slots + 1
    shapes = (rows, max_len + num_drafts + 1), (rows,), (rows, num_drafts)
    if hidden is not None:
        hidden = jax.ShapeDtypeStruct((rows, *hidden.shape), hidden.dtype)
    shapes += (
        (rows,) if gained else None,
        (rows, num_drafts) if tree_depth else None,
        (rows, 1 + tree_depth) if tree_depth and gained else None,
    )
    arrays = [shape and jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    trajectories = None
    if ngram_size is not None:
        paths, pool = (rows, num_drafts, ngram_size - 1), (rows, POOL_SIZE, ngram_size)
        trajectories = Trajectories(*(jax.ShapeDtypeStruct(x, jnp.int32) for x in (paths, pool)))
    return SpeculationState(*arrays[:3], hidden, *arrays[3:], trajectories)


def set_history(
    state: SpeculationState, slot: jax.Array, tokens: jax.Array, length: jax.Array
) -> SpeculationState:
    """State with the first `length` of `tokens` int32 [context limit + width] in `slot`."""
    return state._replace(
        history=state.history.at[slot].set(tokens), lengths=state.lengths.at[slot].set(length)
    )


def force_drafts(
    tree_depth: int,
    state: SpeculationState,
    slots: jax.Array,
    lengths: jax.Array,
    last_tokens: jax.Array,
    stops: jax.Array,
    forced: jax.Array,
) -> SpeculationState:
    """State with drafts that the host knows in the place of others.

    `forced` int32 [rows, k], NO_DRAFT after the last, follow `last_tokens` int32 [rows], which end
    the first `lengths` int32 [rows] tokens of the sequences in `slots` int32 [rows]. A sequence
    that continued otherwise keeps the drafts it has, and so does one that has the forced ones, and
    more after them. A draft whose KV would not be before `stops` int32 [rows] is left out. In trees
    of at most `tree_depth` (0: chains) they are one path.
    """
    trash, most = len(state.drafts) - 1, forced.shape[1]
    drafts = state.drafts[slots]
    places = jnp.arange(most)
    if tree_depth:
        forced = jnp.where(places < tree_depth, forced, NO_DRAFT)
    known = lengths == state.lengths[slots]
    newest = jnp.take_along_axis(state.history[slots], jnp.maximum(lengths - 1, 0)[:, None], axis=1)
    known &= newest[:, 0] == last_tokens
    if not tree_depth:
        known &= ~jnp.all((forced == drafts) | (forced == NO_DRAFT), axis=1)
    forced = jnp.where(lengths[:, None] + places < stops[:, None], forced, NO_DRAFT)
    state = state._replace(
        drafts=state.drafts.at[jnp.where(known, slots, trash)].set(forced),
    )
    if tree_depth:
        # What comes after the longest path has no draft, and its depth.
        chain = jnp.broadcast_to(jnp.minimum(places, tree_depth - 1), forced.shape)
        parents = state.parents.at[jnp.where(known, slots, trash)].set(chain)
        state = state._replace(parents=parents)
    if state.probs is not None:
        state = state._replace(probs=state.probs.at[jnp.where(known, slots, trash)].set(0.0))
    return state


def verify(
    width: int,
    tree_depth: int,
    state: SpeculationState,
    last_tokens: jax.Array,
    token_ids: jax.Array,
    slots: jax.Array,
    counts: jax.Array,
    hidden: jax.Array | None = None,
) -> tuple[SpeculationState, jax.Array, Acceptance]:
    """Accepts the drafts of a step.

    The rows are of the sequences in `slots` int32 [rows]. `token_ids` int32 [at least rows * width]
    are the tokens sampled after each row's newest token and its drafts, of which `counts` int32
    [rows] were computed; `hidden` [at least rows * width, hidden] is what they were sampled from,
    where the state keeps it. The drafts are trees of at most `tree_depth`, or for 0 chains. Returns
    the state, `last_tokens` int32 [slots + 1] with the newest token of each row, and what each row
    gained.
    """
    rows, trash = len(slots), len(last_tokens) - 1
    sampled = token_ids[: rows * width].reshape(rows, width)
    drafts = state.drafts[slots, : width - 1]
    drafted = (drafts != NO_DRAFT) & (jnp.arange(1, width) < counts[:, None])
    parents, path = jnp.broadcast_to(jnp.arange(width - 1), drafts.shape), None
    if tree_depth:
        parents = state.parents[slots, : width - 1]
        equal = drafted & (drafts == jnp.take_along_axis(sampled, parents, axis=1))
        equal = jnp.pad(equal, ((0, 0), (1, 0)))
        path, accepted = accepted_path(trees_of(parents, tree_depth), equal)
        sampled = jnp.take_along_axis(sampled, path, axis=1)
    else:
        equal = drafted & (drafts == sampled[:, :-1])
        accepted = jnp.sum(jnp.cumprod(equal.astype(jnp.int32), axis=1), axis=1)
    num_tokens = jnp.where(slots == trash, 0, accepted + 1)

    newest = jnp.take_along_axis(sampled, accepted[:, None], axis=1)[:, 0]
    last_tokens = last_tokens.at[slots].set(jnp.maximum(newest, 0))
    before, place = state.lengths[slots], jnp.arange(sampled.shape[1])
    gained = place < num_tokens[:, None]
    width_of_history = state.history.shape[1]
    where = jnp.where(gained, before[:, None] + place, width_of_history)
    state = state._replace(
        history=state.history.at[slots[:, None], where].set(sampled, mode="drop"),
        lengths=state.lengths.at[slots].set(before + num_tokens),
    )
    if hidden is not None:
        node = accepted if path is None else jnp.take_along_axis(path, accepted[:, None], 1)[:, 0]
        newest_hidden = hidden[jnp.arange(rows) * width + node]
        state = state._replace(hidden=state.hidden.at[slots].set(newest_hidden))
    if state.gained is not None:
        state = state._replace(gained=state.gained.at[slots].set(num_tokens))
    if state.path is not None and path is not None:
        state = state._replace(path=state.path.at[slots].set(path))
    verified = StepDrafts(jnp.where(drafted, drafts, NO_DRAFT), parents) if width > 1 else None
    return state, last_tokens, Acceptance(num_tokens, jnp.sum(drafted, axis=1), path, verified)


def path_tokens(
    state: SpeculationState, tree_depth: int, slots: jax.Array, nodes: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For `nodes` int32 [rows] of the trees in `slots` int32 [rows]: the nodes on the way there
    int32 [rows, 1 + tree_depth], as `Trees.paths` has them, their drafts [rows, tree_depth], and
    the depths of `nodes` [rows]."""
    trees = trees_of(state.parents, tree_depth)
    paths = trees.paths[slots, nodes]
    drafts = jnp.take_along_axis(state.drafts[slots], jnp.maximum(paths[:, 1:] - 1, 0), axis=1)
    return paths, drafts, trees.depths[slots, nodes]


def following_drafts(
    drafts: jax.Array, parents: jax.Array, nodes: jax.Array, most: int
) -> jax.Array:
    """The drafts that follow `nodes` int32 [rows] of the trees `drafts` and `parents` int32
    [rows, k], in order: int32 [rows, most], NO_DRAFT after the last."""
    count = drafts.shape[1]
    places = jnp.where(parents == nodes[:, None], jnp.arange(count), count)
    places = jnp.sort(places, axis=1)[:, :most]
    drafts = jnp.pad(drafts, ((0, 0), (0, 1)), constant_values=NO_DRAFT)
    return jnp.take_along_axis(drafts, places, axis=1)


def accepted_nodes(
    paths: jax.Array,
    drafts: jax.Array,
    depths: jax.Array,
    nodes: jax.Array,
    token_ids: jax.Array,
) -> jax.Array:
    """Whether all drafts on the way to each of `nodes` int32 [rows] are accepted, bool [rows]. The
    rows of a sequence are its nodes in order, and `token_ids` int32 [rows] are sampled after them;
    the others as `path_tokens` returns them."""
    first = jnp.arange(len(nodes)) - nodes
    sampled = token_ids[jnp.clip(first[:, None] + paths[:, :-1], 0, len(nodes) - 1)]
    on_way = jnp.arange(drafts.shape[1]) < depths[:, None]
    return jnp.all(((drafts == sampled) & (drafts != NO_DRAFT)) | ~on_way, axis=1)
