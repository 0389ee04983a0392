"""The weights of a running engine: replaced in place, and given back while it sleeps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax

from jaxserve.core.errors import ConfigError, OutOfMemoryError, WeightsError
from jaxserve.models.loading.checkpoint import Checkpoint, open_checkpoint
from jaxserve.models.loading.live import check_params, check_same_model, moved
from jaxserve.models.loading.params import load_params
from jaxserve.runtime.startup.engine_plan import EnginePlan
from jaxserve.runtime.state_memory import StateMemory

WeightsSource = Mapping[str, Any] | str | Path
"""A pytree of arrays with the structure of the model's parameters, or a checkpoint."""

Memory = Literal["weights", "kv_cache"]
"""What sleep gives back, by vLLM's names."""

SLEEP_LEVELS = (1, 2)


class StagedWeights(NamedTuple):
    """Parameters that were checked, and the checkpoint that they were read from, if any."""

    params: Mapping[str, Any]
    checkpoint: Checkpoint | None


class LiveWeights:
    """Changes the weights of an engine between its steps. None of this compiles anything.

    Attributes:
        asleep: the memory that is given back at the moment.
    """

    def __init__(self, plan: EnginePlan, memory: StateMemory) -> None:
        self.asleep: frozenset[Memory] = frozenset()
        self._plan = plan
        self._memory = memory
        self._checkpoint: Checkpoint | None = plan.checkpoint
        self._dropped = False

    def staged(self, source: WeightsSource) -> StagedWeights:
        """The parameters of `source`, checked; a checkpoint is read to host memory. Changes
        nothing, in any thread.

        Raises WeightsError for parameters of another structure, shape or dtype, and ModelError for
        a checkpoint that cannot be read.
        """
        plan, shapes = self._plan, self._plan.shapes
        if any(spec.format is not None for spec in jax.tree.leaves(shapes.specs)):
            raise WeightsError(
                f"quantization is {plan.config.quantization!r}, and only weights that are not "
                "packed can be replaced; load the engine without quantization, and a quantized "
                "checkpoint as `jaxserve convert` writes it."
            )
        stated = shapes.family.param_specs(plan.checkpoint.config)
        if isinstance(source, Mapping):
            check_params(source, stated, shapes.dtype)
            return StagedWeights(source, None)
        if not isinstance(source, str | Path):
            raise WeightsError(
                f"params is a {type(source).__name__}; give a pytree of arrays with the structure "
                "of the model's parameters (of an NNX model by from_flax), or a checkpoint's path."
            )
        checkpoint = open_checkpoint(source)
        check_same_model(checkpoint.config, plan.checkpoint.config, str(source))
        host = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
        params = load_params(
            checkpoint,
            stated,
            dtype=plan.config.dtype,
            shardings=jax.tree.map(lambda spec: host, stated),
        )
        return StagedWeights(params, checkpoint)

    def replace(self, staged: StagedWeights) -> None:
        """Puts staged parameters in the place of the present ones, one array after another. No
        step may be in flight."""
        shapes = self._plan.shapes
        stated = shapes.family.param_specs(self._plan.checkpoint.config)
        arrays = moved(staged.params, stated, shapes.specs, shapes.params.shardings)
        self._memory.replace_params(arrays)
        self._checkpoint = staged.checkpoint
        self._dropped = False
        self.asleep -= {"weights"}

    def sleep(self, level: int) -> None:
        """Frees the KV pool, and moves the weights to host memory (level 1) or drops them (2), from
        host memory too. No step may be in flight."""
        if "kv_cache" not in self.asleep:
            self._memory.free_pages()
        if "weights" not in self.asleep or (level == 2 and not self._dropped):
            self._memory.offload_params(keep=level == 1)
            self._dropped = level == 2
        self.asleep = frozenset(get_args(Memory))

    def wake_up(self, tags: frozenset[Memory]) -> None:
        """Takes memory again. Dropped weights are read from the checkpoint that they came from.

        Raises WeightsError when they came from arrays, ModelError when they cannot be read, and
        OutOfMemoryError; what was not taken still sleeps.
        """
        if "weights" in tags & self.asleep:
            with _memory_for("weights"):
                if self._dropped:
                    self._reload()
                else:
                    self._memory.restore_params()
            self.asleep -= {"weights"}
        if "kv_cache" in tags & self.asleep:
            with _memory_for("kv_cache"):
                self._memory.allocate_pages()
            self.asleep -= {"kv_cache"}

    def _reload(self) -> None:
        if self._checkpoint is None:
            raise WeightsError(
                "the weights came from arrays, and sleep(level=2) dropped them; call "
                "update_weights before wake_up, or sleep at level 1."
            )
        shapes = self._plan.shapes
        params = load_params(
            self._checkpoint,
            shapes.specs,
            dtype=self._plan.config.dtype,
            shardings=shapes.params.shardings,
        )
        self._memory.replace_params(iter(jax.tree.leaves(params)))
        self._dropped = False


@contextlib.contextmanager
def _memory_for(what: Memory) -> Iterator[None]:
    """Raises OutOfMemoryError when JAX finds no memory on a device."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        raise OutOfMemoryError(
            f"a device has too little free memory for {what}; end the process that has taken it "
            "since the sleep, and call wake_up again."
        ) from error


def memory_tags(tags: object) -> frozenset[Memory]:
    """`tags` of a wake-up, all of them for None. Raises ConfigError for anything else."""
    known = get_args(Memory)
    wanted = known if tags is None else [tags] if isinstance(tags, str) else tags
    if not isinstance(wanted, Iterable):
        raise ConfigError(f"tags is {tags!r:.80}; give a list of {', '.join(known)}.")
    wanted = list(wanted)
    if unknown := [tag for tag in wanted if tag not in known]:
        raise ConfigError(f"tags names {unknown[0]!r:.80}; they are {', '.join(known)}.")
    return frozenset(wanted)


def check_level(level: object) -> None:
    """Raises ConfigError for a level of sleep that does not exist."""
    if isinstance(level, bool) or level not in SLEEP_LEVELS:
        raise ConfigError(
            f"level is {level!r:.80}; 1 keeps the weights in host memory, 2 drops them."
        )
