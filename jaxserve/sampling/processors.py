"""A caller's own logits processors, compiled into the sampling program."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.core.errors import ConfigError
from jaxserve.core.requests.sampling_params import MAX_EXTRA_ARGS
from jaxserve.models import parallel

LogitsProcessor = Callable[[jax.Array, jax.Array], jax.Array]
"""A pure function of one row: logits float32 [vocab] and the request's number, a float32 scalar, to
logits [vocab]."""


@dataclasses.dataclass(frozen=True)
class Processors:
    """The logits processors of an engine, by name, for a vocabulary."""

    names: tuple[str, ...]
    functions: tuple[LogitsProcessor, ...]
    vocab_size: int

    @classmethod
    def of(cls, given: Sequence[str | LogitsProcessor], vocab_size: int) -> Self:
        """Those of the setting `logits_processors`: functions, or `module:name` of functions.

        Raises ConfigError for one that does not exist, or does not map logits to logits.
        """
        functions = tuple(_imported(each) if isinstance(each, str) else each for each in given)
        names = tuple(getattr(function, "__name__", "") for function in functions)
        if len(functions) > MAX_EXTRA_ARGS or len(set(names)) < len(names) or "" in names:
            raise ConfigError(
                f"logits_processors has the names {', '.join(map(repr, names))}; give at most "
                f"{MAX_EXTRA_ARGS} functions, each with a name of its own."
            )
        logits = jax.ShapeDtypeStruct((vocab_size,), jnp.float32)
        for name, function in zip(names, functions):
            try:
                result = jax.eval_shape(function, logits, jax.ShapeDtypeStruct((), jnp.float32))
            except Exception as error:  # It may raise anything.
                raise ConfigError(
                    f"logits_processors: {name} cannot be traced by JAX with logits [{vocab_size}] "
                    f"and a number: {type(error).__name__}: {error}"
                ) from error
            if getattr(result, "shape", None) != logits.shape or result.dtype != logits.dtype:
                raise ConfigError(
                    f"logits_processors: {name} returns {result}; it must return float32 logits "
                    f"[{vocab_size}], like those that it gets."
                )
        return cls(names, functions, vocab_size)


NO_PROCESSORS = Processors((), (), 0)


def apply_processors(
    scores: jax.Array, numbers: jax.Array, *, processors: Processors, count: int
) -> jax.Array:
    """Scores [rows, padded vocab] with each row's processors applied: those whose `numbers` float32
    [rows, processors] are not NaN. A token with -inf keeps it.

    Rows are processed one by one, each as a whole vocabulary, so that no row's result depends on
    the number of rows.
    """
    whole = parallel.gather_over_vocab(scores[:, :count])
    logits = whole[:, : processors.vocab_size]

    def process(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        before, numbers = row
        after = before
        for place, function in enumerate(processors.functions):
            number = numbers[place]
            after = lax.cond(
                jnp.isnan(number), lambda logits, number: logits, function, after, number
            )
        return jnp.where(before == -jnp.inf, -jnp.inf, after)

    processed = whole.at[:, : processors.vocab_size].set(lax.map(process, (logits, numbers)))
    first = parallel.first_of_vocab(count)
    own = lax.dynamic_slice_in_dim(processed, first, count, axis=1)
    return scores.at[:, :count].set(own)


def _imported(name: str) -> LogitsProcessor:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"logits_processors is {name!r}: {error}; it must be module:function, to be found on "
            "PYTHONPATH."
        ) from error
