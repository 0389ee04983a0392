"""Sampling in plain numpy, one row at a time, sorting freely: what the device must agree with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.sampling import abstract_state


def empty_state(num_slots, vocab_size):
    """What the runner begins with."""
    shapes = abstract_state(num_slots, vocab_size)
    return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), shapes)


def log_softmax(logits):
    shifted = np.asarray(logits, np.float64) - np.max(logits)
    return shifted - np.log(np.exp(shifted).sum())


def processed(logits, params, prompt=(), output=(), stops=(), bad_words=()):
    """Logits [vocab] after masks, bias and penalties, for the next output token."""
    x = np.asarray(logits, np.float64).copy()
    if params.allowed_token_ids is not None:
        mask = np.ones(len(x), bool)
        mask[list(params.allowed_token_ids)] = False
        x[mask] = -np.inf
    for word in bad_words:
        if len(word) == 1 or list(output)[-(len(word) - 1) :] == list(word[:-1]):
            x[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        x[list(stops)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
    for token in set(output):
        times = list(output).count(token)
        x[token] -= params.frequency_penalty * times + params.presence_penalty
    return x


def kept(weights, top_k=0, top_p=1.0, min_p=0.0):
    """Mask of the tokens that min_p, then top_k, then top_p keep; ties stand or fall together."""
    weights = np.asarray(weights, np.float64)
    keep = (weights > 0) & (weights >= min_p * weights.max())
    if top_k > 0:
        ranked = np.sort(weights[keep])[::-1]
        keep &= weights >= ranked[min(top_k, len(ranked)) - 1]
    if top_p < 1:
        ranked = np.sort(weights[keep])[::-1]
        heavy_enough = np.cumsum(ranked) >= top_p * ranked.sum()
        keep &= weights >= ranked[np.argmax(heavy_enough)]
    return keep


def distribution(logits, params, **past):
    """Probabilities [vocab] that the next token is drawn from."""
    x = processed(logits, params, **past)
    if params.greedy:
        return np.eye(len(x))[np.argmax(x)]
    weights = np.exp((x - x.max()) / params.temperature)
    weights *= kept(weights, params.top_k, params.top_p, params.min_p)
    return weights / weights.sum()


GREEDY = SamplingParams(temperature=0.0)
