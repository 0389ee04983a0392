"""Trains Medusa heads."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxserve.core.model_config import ModelConfig
from jaxserve.models.drafters import medusa
from jaxserve.models.drafters.medusa import MedusaConfig
from jaxserve.models.family import Family, Params
from jaxserve.models.loading.drafters.medusa import save_heads
from jaxserve.models.loading.params import Progress
from jaxserve.training.config import TrainingConfig
from jaxserve.training.loop import Frozen, fit, learning_rate
from jaxserve.training.targets import Target

_FURTHER = 0.8
"""Weight of a head's loss, relative to that of the head before it (Medusa, section 2.2.1)."""


@dataclasses.dataclass(frozen=True)
class TrainedHeads:
    """Heads [heads, hidden, hidden], their config, and the loss of every step."""

    config: MedusaConfig
    blocks: np.ndarray
    losses: list[float]

    def save(self, directory: Path) -> None:
        """Write them for speculation."""
        save_heads(directory, self.config, self.blocks)

    def save_untrained(self, directory: Path) -> None:
        """Write the heads that training began with."""
        save_heads(directory, self.config, self.blocks * 0)


class Heads(nnx.Module):
    """Heads of one residual block. At first they give the model's own next token again."""

    def __init__(self, config: MedusaConfig) -> None:
        (spec,) = jax.tree.leaves(medusa.param_specs(config))
        self.blocks = nnx.Param(jnp.zeros(spec.shape, jnp.float32))


def train(
    model: str | Path | None,
    targets: list[Target],
    directory: Path,
    config: TrainingConfig,
    progress: Progress,
) -> TrainedHeads:
    """Train heads for `model` on its own answers, as `loop.fit` does. Raises as that, and as
    `open_checkpoint`."""
    frozen = Frozen(model)
    shapes = MedusaConfig(config.num_heads, 1, frozen.config.hidden_size, frozen.config.vocab_size)
    heads, transform = Heads(shapes), optax.adamw(learning_rate(config))
    of_batch = functools.partial(loss, frozen.family, frozen.config, shapes)
    losses = fit(frozen, heads, of_batch, transform, targets, directory, config, progress)
    return TrainedHeads(shapes, np.asarray(heads.blocks[...]), losses)


def loss(
    family: Family,
    config: ModelConfig,
    shapes: MedusaConfig,
    heads: Heads,
    params: Params,
    hidden: jax.Array,
    token_ids: jax.Array,
    generated: jax.Array,
    key: jax.Array,
) -> jax.Array:
    """The mean cross entropy of each head's guesses of generated tokens, summed with less weight
    the further ahead they are. Nothing is random."""
    total = jnp.float32(0)
    for index in range(shapes.num_heads):
        ahead = index + 2  # The next token is the model's own guess.
        states = hidden[:, :-ahead].reshape(-1, hidden.shape[-1])
        guessed = medusa.head({"blocks": heads.blocks[...]}, shapes, jnp.int32(index), states)
        logits = family.logits(params, config, guessed)
        counted = generated[:, ahead:].reshape(-1)
        each = optax.softmax_cross_entropy_with_integer_labels(
            logits, token_ids[:, ahead:].reshape(-1)
        )
        mean = jnp.sum(jnp.where(counted, each, 0)) / jnp.maximum(jnp.sum(counted), 1)
        total += _FURTHER**index * mean
    return total
