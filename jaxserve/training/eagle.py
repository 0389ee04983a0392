"""Trains a draft layer of EAGLE (Li et al. 2024, 2401.15077)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxserve.core.model_config import ModelConfig
from jaxserve.models.drafters import eagle
from jaxserve.models.family import Family, Params, ParamSpec
from jaxserve.models.loading.drafters.eagle import save_layer
from jaxserve.models.loading.params import Progress
from jaxserve.training.config import TrainingConfig
from jaxserve.training.dense import draft_states
from jaxserve.training.loop import Frozen, fit, learning_rate
from jaxserve.training.targets import Target

_OF_TOKENS = 0.1
"""Weight of the cross entropy of tokens beside the distance of hidden states (section 4.2)."""
_NOISE = 0.1
"""Most noise that is added to a hidden state, so that errors of its own mislead the layer less
(section 4.2)."""
_MAX_GRADIENT, _SECOND_MOMENT = 0.5, 0.95
"""Norm that gradients are clipped to, and the decay of their squares (section 4)."""


@dataclasses.dataclass(frozen=True)
class TrainedLayer:
    """A layer, of which `write` makes files for speculation, and the loss of every step;
    `untrained` is how it began."""

    write: Callable[[Path, Params], None]
    params: Params
    untrained: Params
    losses: list[float]

    def save(self, directory: Path) -> None:
        """Write it for speculation."""
        self.write(directory, self.params)

    def save_untrained(self, directory: Path) -> None:
        """Write the layer that training began with."""
        self.write(directory, self.untrained)


class Layer(nnx.Module):
    """A layer with these parameters, arrays as `eagle.param_specs` has them."""

    def __init__(self, params: Params) -> None:
        self.params = nnx.data(jax.tree.map(lambda array: nnx.Param(jnp.asarray(array)), params))

    @property
    def arrays(self) -> Params:
        """The parameters as arrays."""
        return jax.tree.map(
            lambda param: param[...], self.params, is_leaf=lambda leaf: isinstance(leaf, nnx.Param)
        )


def random_params(specs: Params, seed: int) -> Params:
    """Parameters of these specs: matrices with results as large as their inputs."""
    rng = np.random.default_rng(seed)

    def initial(spec: ParamSpec) -> np.ndarray:
        if spec.init == "normal":
            _, inputs = spec.matrix
            return rng.normal(0, inputs**-0.5, spec.shape).astype(np.float32)
        return np.full(spec.shape, spec.init == "ones", np.float32)

    return jax.tree.map(initial, specs)


def untrained(config: ModelConfig, seed: int) -> Params:
    """Parameters of a layer that gives the hidden state that it gets, so that at first it guesses
    the model's own next token again."""
    params = random_params(eagle.param_specs(config, biased=True), seed)
    size, (layer,) = config.hidden_size, params["layers"]
    params["fc"] = np.concatenate([np.zeros((size, size)), np.eye(size)], axis=1, dtype=np.float32)
    for name in ("attn_out", "down"):
        layer[name] = np.zeros_like(layer[name])
    return params


def train(
    model: str | Path | None,
    targets: list[Target],
    directory: Path,
    config: TrainingConfig,
    progress: Progress,
) -> TrainedLayer:
    """Train a layer for `model` on its own answers, as `loop.fit` does. Raises as that, as
    `open_checkpoint` and as `eagle.layer_for`."""
    frozen = Frozen(model)
    shapes = eagle.layer_for(frozen.config)
    first = untrained(shapes, config.seed)
    layer = Layer(first)
    of_batch = functools.partial(loss, frozen.family, frozen.config, shapes)
    losses = fit(frozen, layer, of_batch, optimizer(config), targets, directory, config, progress)

    def write(path: Path, params: Params) -> None:
        save_layer(path, shapes, params)

    return TrainedLayer(write, jax.tree.map(np.asarray, layer.arrays), first, losses)


def optimizer(config: TrainingConfig) -> optax.GradientTransformation:
    """As the paper trains (section 4)."""
    return optax.chain(
        optax.clip_by_global_norm(_MAX_GRADIENT),
        optax.adamw(learning_rate(config), b2=_SECOND_MOMENT),
    )


def loss(
    family: Family,
    config: ModelConfig,
    shapes: ModelConfig,
    layer: Layer,
    params: Params,
    hidden: jax.Array,
    token_ids: jax.Array,
    generated: jax.Array,
    key: jax.Array,
) -> jax.Array:
    """The smooth L1 distance of the hidden states that the layer expects after generated tokens
    from the model's, and the cross entropy of their tokens' distributions, with less weight. Noise
    by `key` is added to the states that it follows."""
    sequences, tokens, size = hidden.shape
    positions = jnp.tile(jnp.arange(tokens, dtype=jnp.int32), sequences)
    embedded, _ = family.embed(params, config, token_ids.reshape(-1), positions)
    embedded = embedded.reshape(hidden.shape)[:, 1:]
    noise = jax.random.uniform(key, hidden.shape, hidden.dtype, -_NOISE, _NOISE)
    expected = draft_states(shapes, layer.arrays, embedded, (hidden + noise)[:, :-1])

    expected, right = expected.reshape(-1, size), hidden[:, 1:].reshape(-1, size)
    distance = optax.huber_loss(expected, right).mean(axis=-1)
    logits = family.logits(params, config, expected)
    target_probs = jax.nn.softmax(family.logits(params, config, right))
    each = distance + _OF_TOKENS * optax.softmax_cross_entropy(logits, target_probs)
    counted = generated[:, 1:].reshape(-1)
    return jnp.sum(jnp.where(counted, each, 0)) / jnp.maximum(jnp.sum(counted), 1)
