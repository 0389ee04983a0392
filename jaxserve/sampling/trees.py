"""Trees of drafts on the device: several guesses of a token, of which one at most is accepted.

The tokens of a row are the nodes of a tree, parents before children and in order of depth: node 0
is the newest token, node i + 1 is draft i. The target samples the token after each node as it would
after those on the way to it alone, with the noise of their number; siblings are different tokens,
so at most one of them equals the token sampled after their parent, and those accepted are one path.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Trees(NamedTuple):
    """int32 `depths` [rows, width]: how many drafts are on the way to a node, itself included.
    `paths` [rows, width, 1 + most]: the nodes on that way from node 0 on, by depth, then the node
    itself again. `mask` bool [rows, width, width]: whether the second node is on the way to the
    first."""

    depths: jax.Array
    paths: jax.Array
    mask: jax.Array


def trees_of(parents: jax.Array, depth: int) -> Trees:
    """The trees of `parents` int32 [rows, width - 1], the node that each draft follows, with at
    most `depth` drafts on the way to any."""
    rows, count = parents.shape
    nodes = jnp.broadcast_to(jnp.arange(1 + count), (rows, 1 + count))
    before = jnp.pad(parents, ((0, 0), (1, 0)))
    climbed = [nodes]
    for _ in range(depth):
        climbed.append(jnp.take_along_axis(before, climbed[-1], axis=1))
    upwards = jnp.stack(climbed, axis=2)
    depths = jnp.sum(upwards > 0, axis=2)
    steps_up = jnp.maximum(depths[:, :, None] - jnp.arange(1 + depth), 0)
    paths = jnp.take_along_axis(upwards, steps_up, axis=2)
    mask = jnp.any(paths[:, :, :, None] == jnp.arange(1 + count), axis=2)
    return Trees(depths, paths, mask)


def accepted_path(trees: Trees, equal: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The nodes that are accepted, int32 [rows, 1 + most] by depth, and the depth of the last int32
    [rows]; after that one the others are of no meaning. `equal` bool [rows, width]: whether a node
    is the token sampled after its parent."""
    on_way = jnp.take_along_axis(equal[:, None], trees.paths, axis=2) | (trees.paths == 0)
    reached = jnp.where(jnp.all(on_way, axis=2), trees.depths, -1)
    last = jnp.argmax(reached, axis=1)[:, None]
    path = jnp.take_along_axis(trees.paths, last[:, :, None], axis=1)[:, 0]
    return path, jnp.take_along_axis(trees.depths, last, axis=1)[:, 0]
