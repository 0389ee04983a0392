"""Trains Medusa heads for a model whose weights stay as they are."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

from jaxserve.core.errors import ConfigError
from jaxserve.core.model_config import ModelConfig
from jaxserve.models import medusa
from jaxserve.models.family import Family, Params
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.params import load_params
from jaxserve.models.medusa import MedusaConfig
from jaxserve.models.registry import get_family, param_specs
from jaxserve.training.dense import hidden_states
from jaxserve.training.targets import Target, Window, windows

Progress = Callable[[int, int], None]
_FURTHER = 0.8
"""Weight of a head's loss, relative to that of the head before it (Medusa, section 2.2.1)."""
_WARM_UP = 0.1
"""Share of the steps in which the learning rate rises."""


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """How heads are trained.

    Attributes:
        num_heads: tokens that are guessed beyond the next one, each by a head of its own.
        steps: batches to train on.
        batch_size: sequences of a batch.
        sequence_length: tokens of a sequence.
        learning_rate: the highest; it rises, and falls to 0 along a cosine.
        checkpoint_every: steps between checkpoints, from which training goes on when it is run
            again.
        seed: of the order of the batches.
    """

    num_heads: int = 3
    steps: int = 300
    batch_size: int = 4
    sequence_length: int = 256
    learning_rate: float = 1e-3
    checkpoint_every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the field and its value."""
        for field in ("num_heads", "steps", "batch_size", "checkpoint_every"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} is {getattr(self, field)}; it must be 1 or more.")
        if self.sequence_length < self.num_heads + 2:
            raise ConfigError(
                f"sequence_length is {self.sequence_length}; heads that guess {self.num_heads} "
                f"tokens ahead need {self.num_heads + 2} or more."
            )
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"learning_rate is {self.learning_rate}; it must be positive.")


@dataclasses.dataclass(frozen=True)
class Trained:
    """Heads [heads, hidden, hidden], their config, and the loss of every step."""

    config: MedusaConfig
    blocks: np.ndarray
    losses: list[float]


class Heads(nnx.Module):
    """Heads of one residual block. At first they give the model's own next token again."""

    def __init__(self, config: MedusaConfig) -> None:
        (spec,) = jax.tree.leaves(medusa.param_specs(config))
        self.blocks = nnx.Param(jnp.zeros(spec.shape, jnp.float32))


class _Frozen:
    """The model that heads are trained for."""

    def __init__(self, model: str | Path | None) -> None:
        checkpoint = open_checkpoint(model)
        self.config: ModelConfig = checkpoint.config
        self.family: Family = get_family(self.config.architecture)
        self.params: Params = load_params(checkpoint, param_specs(self.config), dtype="float32")


def train(
    model: str | Path | None,
    targets: list[Target],
    directory: Path,
    config: TrainingConfig,
    progress: Progress,
) -> Trained:
    """Train heads for `model` on its own answers.

    A checkpoint in `directory` is gone on from, so that a run that was killed ends with the very
    same heads. Raises ConfigError when there are fewer windows of tokens than a batch has, and as
    `open_checkpoint` does.
    """
    data = windows(targets, config.sequence_length)
    if len(data) < config.batch_size:
        raise ConfigError(
            f"the answers fill {len(data)} sequences of {config.sequence_length} tokens, and "
            f"batch_size is {config.batch_size}; give more prompts, or a smaller batch_size."
        )
    frozen = _Frozen(model)
    shapes = MedusaConfig(config.num_heads, 1, frozen.config.hidden_size, frozen.config.vocab_size)
    heads = Heads(shapes)
    optimizer = nnx.Optimizer(heads, optax.adamw(_schedule(config)), wrt=nnx.Param)
    step = nnx.jit(functools.partial(_step, frozen.family, frozen.config, shapes))
    batches, losses = iter(_batches(data, config)), []
    with ocp.CheckpointManager(directory.absolute(), options=_options(config)) as manager:
        if manager.latest_step() is not None:
            losses = _restore(manager, heads, optimizer, batches)
        while len(losses) < config.steps:
            losses.append(float(step(frozen.params, heads, optimizer, *next(batches))))
            progress(len(losses), config.steps)
            _save(manager, heads, optimizer, batches, losses)
    return Trained(shapes, np.asarray(heads.blocks[...]), losses)


def _schedule(config: TrainingConfig) -> optax.Schedule:
    rising = max(1, round(_WARM_UP * config.steps))
    return optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, rising, max(config.steps, rising + 1)
    )


def _batches(data: list[Window], config: TrainingConfig) -> grain.IterDataset:
    """Token ids int32 and which the model generated bool, each [batch_size, sequence_length]."""
    dataset = grain.MapDataset.source(data).seed(config.seed).shuffle().repeat()
    dataset = dataset.map(lambda window: (window.token_ids, window.generated))
    ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return dataset.batch(config.batch_size, drop_remainder=True).to_iter_dataset(ahead)


def _step(
    family: Family,
    config: ModelConfig,
    shapes: MedusaConfig,
    params: Params,
    heads: Heads,
    optimizer: nnx.Optimizer,
    token_ids: jax.Array,
    generated: jax.Array,
) -> jax.Array:
    """Updates the heads by a batch, and returns its loss."""
    hidden = hidden_states(family, config, params, token_ids)
    value, gradients = nnx.value_and_grad(
        lambda heads: loss(family, config, shapes, params, heads, hidden, token_ids, generated)
    )(heads)
    optimizer.update(heads, gradients)
    return value


def loss(
    family: Family,
    config: ModelConfig,
    shapes: MedusaConfig,
    params: Params,
    heads: Heads,
    hidden: jax.Array,
    token_ids: jax.Array,
    generated: jax.Array,
) -> jax.Array:
    """The mean cross entropy of each head's guesses of generated tokens, summed with less weight
    the further ahead they are."""
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


def _options(config: TrainingConfig) -> ocp.CheckpointManagerOptions:
    return ocp.CheckpointManagerOptions(
        max_to_keep=1, save_interval_steps=config.checkpoint_every, create=True
    )


def _arrays(heads: Heads, optimizer: nnx.Optimizer) -> dict[str, Any]:
    """All arrays that training changes, by their places as text."""
    leaves = jax.tree.leaves((nnx.state(heads), nnx.state(optimizer)))
    return {str(place): leaf for place, leaf in enumerate(leaves)}


def _save(
    manager: ocp.CheckpointManager,
    heads: Heads,
    optimizer: nnx.Optimizer,
    batches: Iterator[Any],
    losses: list[float],
) -> None:
    if not manager.should_save(len(losses)):
        return
    # Written by a thread while training continues, which changes both.
    rest = copy.deepcopy({"batches": batches.get_state(), "losses": losses})
    manager.save(
        len(losses),
        args=ocp.args.Composite(
            arrays=ocp.args.StandardSave(_arrays(heads, optimizer)),
            rest=ocp.args.JsonSave(rest),
        ),
    )


def _restore(
    manager: ocp.CheckpointManager,
    heads: Heads,
    optimizer: nnx.Optimizer,
    batches: Iterator[Any],
) -> list[float]:
    """Puts the newest checkpoint in place, and returns the losses until then."""
    restored = manager.restore(
        manager.latest_step(),
        args=ocp.args.Composite(
            arrays=ocp.args.StandardRestore(_arrays(heads, optimizer)),
            rest=ocp.args.JsonRestore(),
        ),
    )
    state, structure = nnx.state(heads), None
    both = (state, nnx.state(optimizer))
    structure = jax.tree.structure(both)
    leaves = [restored.arrays[str(place)] for place in range(structure.num_leaves)]
    of_heads, of_optimizer = structure.unflatten(leaves)
    nnx.update(heads, of_heads)
    nnx.update(optimizer, of_optimizer)
    batches.set_state(restored.rest["batches"])
    return restored.rest["losses"]
