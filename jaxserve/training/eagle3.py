"""Trains a draft layer of EAGLE-3 (Li et al. 2025, 2503.01840).

The layer learns the model's distribution of tokens alone, from low, middle and high states of the
model fused, and in further passes from its own: in pass j it follows at each position what pass
j - 1 gave for the position before, as it does when it drafts one token after another (the paper's
training-time test).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxserve.core.model_config import ModelConfig
from jaxserve.models.drafters import eagle3
from jaxserve.models.drafters.eagle3 import Eagle3Config
from jaxserve.models.family import Params
from jaxserve.models.loading.drafters.eagle3 import save_layer
from jaxserve.models.loading.params import Progress
from jaxserve.training.config import TrainingConfig
from jaxserve.training.dense import draft_states
from jaxserve.training.eagle import Layer, TrainedLayer, optimizer, random_params
from jaxserve.training.loop import Frozen, fit
from jaxserve.training.targets import Target, windows

_FURTHER = 0.8
"""Weight of the loss of a pass, relative to that of the pass before it."""
_UNSEEN = -1e30


def train(
    model: str | Path | None,
    targets: list[Target],
    directory: Path,
    config: TrainingConfig,
    progress: Progress,
) -> TrainedLayer:
    """Train a layer for `model` on its own answers, as `loop.fit` does. It guesses the tokens that
    are most frequent in them.

    Raises as that, as `open_checkpoint`, as `eagle3.layer_for` and as `eagle3.default_aux_layers`.
    """
    frozen = Frozen(model)
    shapes = eagle3.layer_for(frozen.config)
    aux_layers = eagle3.default_aux_layers(frozen.config.num_layers)
    frozen = Frozen(model, aux_layers)
    guessable = frequent(targets, config.draft_vocab_size, frozen.config.vocab_size)
    own = Eagle3Config(aux_layers, len(guessable), mapped=False)
    first = untrained(frozen, shapes, own, guessable, targets, config)
    layer = Layer(first)
    of_batch = functools.partial(loss, frozen, shapes, guessable, config.num_heads)
    losses = fit(frozen, layer, of_batch, optimizer(config), targets, directory, config, progress)
    d2t = {"d2t": (guessable - np.arange(len(guessable))).astype(np.int32)}
    trained = jax.tree.map(np.asarray, layer.arrays)
    own = dataclasses.replace(own, mapped=True)

    def write(path: Path, params: Params) -> None:
        save_layer(path, shapes, own, params)

    return TrainedLayer(write, trained | d2t, first | d2t, losses)


def frequent(targets: list[Target], count: int, vocab_size: int) -> np.ndarray:
    """The ids of the `count` most frequent tokens of these targets, ascending; those that are not
    in them follow in the order of their ids."""
    seen: collections.Counter[int] = collections.Counter()
    for target in targets:
        seen.update(target.prompt)
        seen.update(target.output)
    ranked = sorted(range(vocab_size), key=lambda token: (-seen[token], token))
    return np.sort(np.array(ranked[:count], np.int32))


def untrained(
    frozen: Frozen,
    shapes: ModelConfig,
    own: Eagle3Config,
    guessable: np.ndarray,
    targets: list[Target],
    config: TrainingConfig,
) -> Params:
    """Parameters of a layer that begins as the model's last one: it follows the high state, scaled
    to values around one, and has the rows of the model's head for its tokens. What the model has
    no parameter of that shape for is random."""
    params = random_params(eagle3.param_specs(shapes, own), config.seed)
    model, (layer,), size = frozen.params, params["layers"], shapes.hidden_size
    params["lm_head"] = np.asarray(_head(model)[1])[guessable].astype(np.float32)

    def taken(into: Params, name: str, array: jax.Array | None, scale: float = 1.0) -> None:
        if array is not None and array.shape == into[name].shape:
            into[name] = np.asarray(array, np.float32) * np.float32(scale)

    (window,) = windows(targets, config.sequence_length)[:1]
    high = frozen.states([window])[0, :, -size:]
    scale = float(1 / np.median(np.sqrt(np.mean(high**2, axis=-1))))
    fc = np.zeros_like(params["fc"])
    fc[:, -size:] = scale * np.eye(size)
    params["fc"] = fc
    taken(params, "norm", model.get("final_norm"))
    last = model["layers"][-1]
    for name in ("mlp_norm", "gate_up"):
        taken(layer, name, last.get(name))
    for name in ("attn_out", "down"):
        taken(layer, name, last.get(name), scale)
    taken(layer, "hidden_norm", last.get("attn_norm"))
    of_states = last.get("qkv")
    if of_states is not None and (*of_states.shape[:-1], 2 * size) == layer["qkv"].shape:
        of_states = np.asarray(of_states, np.float32)
        layer["qkv"] = np.concatenate([np.zeros_like(of_states), of_states], axis=-1)
    return params


def _head(params: Params) -> tuple[str, jax.Array]:
    """The name and the rows of the model's output layer."""
    name = "lm_head" if "lm_head" in params else "embed"
    return name, params[name]


def loss(
    frozen: Frozen,
    shapes: ModelConfig,
    guessable: np.ndarray,
    passes: int,
    layer: Layer,
    params: Params,
    states: jax.Array,
    token_ids: jax.Array,
    generated: jax.Array,
    key: jax.Array,
) -> jax.Array:
    """The cross entropy of the tokens that the layer guesses after generated ones, with what the
    model makes of the same vocabulary; of `passes`, with less weight the later they are. Nothing is
    random."""
    family, config, arrays = frozen.family, frozen.config, layer.arrays
    size = shapes.hidden_size
    hidden, followed = states[..., :size], states[..., size:]
    name, rows = _head(params)
    fewer = dataclasses.replace(config, vocab_size=len(guessable))
    right = hidden[:, 1:].reshape(-1, size)
    target_probs = jax.nn.softmax(family.logits(params | {name: rows[guessable]}, fewer, right))

    sequences, tokens = token_ids.shape
    positions = jnp.tile(jnp.arange(tokens, dtype=jnp.int32), sequences)
    embedded, _ = family.embed(params, config, token_ids.reshape(-1), positions)
    embedded = embedded.reshape(hidden.shape)[:, 1:]
    feature_layer = eagle3.feature_layer(shapes, Eagle3Config((), len(guessable), mapped=False))
    features = eagle3.features(arrays, followed[:, :-1].reshape(-1, followed.shape[-1]))
    features = features.reshape(embedded.shape)

    earlier: list[tuple[jax.Array, jax.Array]] = []
    attention = functools.partial(_attention, shapes, sequences, earlier)
    total = jnp.float32(0)
    for index in range(passes):
        features = draft_states(shapes, arrays, embedded, features, feature_layer, attention)
        logits = eagle3.draft_logits(shapes.rms_norm_eps, arrays, features.reshape(-1, size))
        each = optax.softmax_cross_entropy(logits, target_probs).reshape(sequences, -1)
        counted = generated[:, 1:] & (jnp.arange(tokens - 1) >= index)
        mean = jnp.sum(jnp.where(counted, each, 0)) / jnp.maximum(jnp.sum(counted), 1)
        total += _FURTHER**index * mean
        features = jnp.roll(features, 1, axis=1)  # Each follows what was given for the one before.
    return total


def _attention(
    config: ModelConfig,
    sequences: int,
    earlier: list[tuple[jax.Array, jax.Array]],
    layer: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """As LayeredAttention, of the pass after those whose keys and values are `earlier`, to which
    its own are added. At each position pass j attends to the first pass up to j - 1 positions
    before, and to one position of each pass since, as drafts that follow one another do."""
    q, k, v = (x.reshape(sequences, -1, *x.shape[1:]) for x in (q, k, v))
    earlier.append((k, v))
    index, (first_k, first_v) = len(earlier) - 1, earlier[0]
    q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("sqhgd,skhd->shgqk", q, first_k, preferred_element_type=jnp.float32)
    distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(q.shape[1])
    scores = jnp.where(distance >= index, scores * config.attention_scale, _UNSEEN)
    own = [
        tuple(jnp.roll(x, index - since, axis=1) for x in kept)
        for since, kept in enumerate(earlier[1:], 1)
    ]
    ones = [jnp.einsum("sqhgd,sqhd->shgq", q, each_k)[..., None] for each_k, _ in own]
    scores = jnp.concatenate([scores, *(one * config.attention_scale for one in ones)], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("shgqk,skhd->sqhgd", weights[..., : q.shape[1]], first_v)
    for place, (_, each_v) in enumerate(own, q.shape[1]):
        out += jnp.einsum("shgq,sqhd->sqhgd", weights[..., place], each_v)
    return out.reshape(-1, q.shape[2] * q.shape[3], q.shape[4])
