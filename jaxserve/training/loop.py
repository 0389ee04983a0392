"""The training of what drafts for a model whose weights stay as they are."""

from __future__ import annotations

import copy
import functools
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
from jaxserve.models.family import Family, Params
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.params import Progress, load_params
from jaxserve.models.registry import get_family, param_specs
from jaxserve.training.config import TrainingConfig
from jaxserve.training.dense import followed_states
from jaxserve.training.targets import Target, TargetWindow, windows

_WARM_UP = 0.1
"""Share of the steps in which the learning rate rises."""
_KEPT_BYTES = 4 << 30
"""Host memory for hidden states, so that windows that come again are not computed again."""


class Frozen:
    """The model that a drafter is trained for, which follows what enters `aux_layers`."""

    def __init__(self, model: str | Path | None, aux_layers: tuple[int, ...] = ()) -> None:
        checkpoint = open_checkpoint(model)
        self.config: ModelConfig = checkpoint.config
        self.family: Family = get_family(self.config.architecture)
        self.params: Params = load_params(checkpoint, param_specs(self.config), dtype="float32")

        self._aux_layers = aux_layers
        self._program = jax.jit(self._states)
        self._kept: dict[int, np.ndarray] = {}
        self._num_bytes = 0

    def states(self, windows: list[TargetWindow]) -> np.ndarray:
        """The final hidden states of each window, and what enters the layers that are followed,
        side by side [windows, tokens, (1 + layers) * hidden]."""
        return np.stack([self._of(window) for window in windows])

    def _of(self, window: TargetWindow) -> np.ndarray:
        """Each window is computed alone, so that its states do not depend on those beside it."""
        kept = self._kept.get(window.index)
        if kept is None:
            kept = np.asarray(self._program(self.params, window.token_ids[None])[0])
            if self._num_bytes + kept.nbytes <= _KEPT_BYTES:
                self._kept[window.index] = kept
                self._num_bytes += kept.nbytes
        return kept

    def _states(self, params: Params, token_ids: jax.Array) -> jax.Array:
        of_model = self.family, self.config, params, token_ids
        return jnp.concatenate(followed_states(*of_model, self._aux_layers), axis=-1)


Loss = Callable[[Any, Params, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""The loss float32 of a drafter, an nnx.Module, for the model's parameters, its states
[batch, tokens, ...] as `Frozen.states` has them, of token ids int32 [batch, tokens], which of them
the model generated bool [batch, tokens], and a random key of the step."""


def fit(
    frozen: Frozen,
    drafter: nnx.Module,
    loss: Loss,
    transform: optax.GradientTransformation,
    targets: list[Target],
    directory: Path,
    config: TrainingConfig,
    progress: Progress,
) -> list[float]:
    """Train `drafter` in place on the model's own answers, and return the loss of every step.

    A checkpoint in `directory` is gone on from, so that a run that was killed ends with the very
    same drafter. Raises ConfigError when there are fewer windows of tokens than a batch has.
    """
    data = windows(targets, config.sequence_length)
    if len(data) < config.batch_size:
        raise ConfigError(
            f"the answers fill {len(data)} sequences of {config.sequence_length} tokens, and "
            f"batch_size is {config.batch_size}; give more prompts, or a smaller batch_size."
        )
    optimizer = nnx.Optimizer(drafter, transform, wrt=nnx.Param)
    step = nnx.jit(functools.partial(_step, loss))
    key = jax.random.key(config.seed)
    batches, losses = iter(_batches(data, config)), []
    with ocp.CheckpointManager(directory.absolute(), options=_options(config)) as manager:
        if manager.latest_step() is not None:
            losses = _restore(manager, drafter, optimizer, batches)
        while len(losses) < config.steps:
            own = jax.random.fold_in(key, len(losses))
            chosen = [data[index] for index in next(batches)]
            arrays = frozen.states(chosen), *_stacked(chosen)
            losses.append(float(step(frozen.params, drafter, optimizer, own, *arrays)))
            progress(len(losses), config.steps)
            _save(manager, drafter, optimizer, batches, losses)
    return losses


def _step(
    loss: Loss,
    params: Params,
    drafter: nnx.Module,
    optimizer: nnx.Optimizer,
    key: jax.Array,
    states: jax.Array,
    token_ids: jax.Array,
    generated: jax.Array,
) -> jax.Array:
    """Updates the drafter by a batch, and returns its loss."""
    value, gradients = nnx.value_and_grad(
        lambda drafter: loss(drafter, params, states, token_ids, generated, key)
    )(drafter)
    optimizer.update(drafter, gradients)
    return value


def learning_rate(config: TrainingConfig) -> optax.Schedule:
    """The rate of every step: it rises, and falls to 0 along a cosine."""
    rising = max(1, round(_WARM_UP * config.steps))
    return optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, rising, max(config.steps, rising + 1)
    )


def _stacked(windows: list[TargetWindow]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids int32 and which the model generated bool, each [windows, tokens]."""
    return (
        np.stack([window.token_ids for window in windows]),
        np.stack([window.generated for window in windows]),
    )


def _batches(data: list[TargetWindow], config: TrainingConfig) -> grain.IterDataset:
    """Indices of windows, int [batch_size]."""
    dataset = grain.MapDataset.source(range(len(data))).seed(config.seed).shuffle().repeat()
    ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return dataset.batch(config.batch_size, drop_remainder=True).to_iter_dataset(ahead)


def _options(config: TrainingConfig) -> ocp.CheckpointManagerOptions:
    return ocp.CheckpointManagerOptions(
        max_to_keep=1, save_interval_steps=config.checkpoint_every, create=True
    )


def _arrays(drafter: nnx.Module, optimizer: nnx.Optimizer) -> dict[str, Any]:
    """All arrays that training changes, by their places as text."""
    leaves = jax.tree.leaves((nnx.state(drafter), nnx.state(optimizer)))
    return {str(place): leaf for place, leaf in enumerate(leaves)}


def _save(
    manager: ocp.CheckpointManager,
    drafter: nnx.Module,
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
            arrays=ocp.args.StandardSave(_arrays(drafter, optimizer)),
            rest=ocp.args.JsonSave(rest),
        ),
    )


def _restore(
    manager: ocp.CheckpointManager,
    drafter: nnx.Module,
    optimizer: nnx.Optimizer,
    batches: Iterator[Any],
) -> list[float]:
    """Puts the newest checkpoint in place, and returns the losses until then."""
    restored = manager.restore(
        manager.latest_step(),
        args=ocp.args.Composite(
            arrays=ocp.args.StandardRestore(_arrays(drafter, optimizer)),
            rest=ocp.args.JsonRestore(),
        ),
    )
    structure = jax.tree.structure((nnx.state(drafter), nnx.state(optimizer)))
    leaves = [restored.arrays[str(place)] for place in range(structure.num_leaves)]
    of_drafter, of_optimizer = structure.unflatten(leaves)
    nnx.update(drafter, of_drafter)
    nnx.update(optimizer, of_optimizer)
    batches.set_state(restored.rest["batches"])
    return restored.rest["losses"]
