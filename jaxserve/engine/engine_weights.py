"""An engine's weights and memory, changed between steps: what `update_weights` and `sleep` do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf

from jaxserve.core.errors import ConfigError
from jaxserve.core.process.signals import interrupts_held
from jaxserve.engine.engine_core import EngineCore
from jaxserve.engine.local_commands import Retract, Sleep, UseWeights, WakeUp
from jaxserve.runtime.live_weights import (
    LiveWeights,
    StagedWeights,
    WeightsSource,
    check_level,
    memory_tags,
)
from jaxserve.runtime.startup.engine_plan import EnginePlan


class EngineWeights:
    """Replaces the weights of a running engine, and gives back its memory and takes it again."""

    def __init__(
        self,
        core: EngineCore,
        live: LiveWeights,
        plan: EnginePlan,
        num_hosts: int,
        check_open: Callable[[], None],
        refuse: Callable[[str], None],
    ) -> None:
        """`check_open()` raises EngineClosedError on a closed engine, and `refuse(reason)` closes
        it to requests."""
        self._core, self._plan, self._num_hosts = core, plan, num_hosts
        self._live: LiveWeights | None = live
        self._check_open, self._refuse = check_open, refuse

    @property
    def version(self) -> int:
        """How often `update` has replaced the weights that serve."""
        return self._core.weights_version

    def stage(self, source: WeightsSource) -> StagedWeights:
        """Weights for `update`, checked, and read to host memory if `source` is a checkpoint. Any
        thread can do it while the engine runs. Raises WeightsError or ModelError, and ConfigError
        in a multi-host job."""
        self._check_changeable("update_weights")
        return self._live.staged(source)

    def update(self, source: WeightsSource | StagedWeights) -> int:
        """As `LLM.update_weights`. Unfinished requests keep their tokens; their KV is recomputed by
        the new weights. A sleeping engine takes its memory for weights again."""
        staged = source if isinstance(source, StagedWeights) else self.stage(source)
        self._check_changeable("update_weights")
        with self._changing("update_weights"):
            self._core.apply(Retract())
            self._live.replace(staged)
            self._core.apply(UseWeights())
        return self.version

    def sleep(self, level: int = 1) -> None:
        """As `LLM.sleep`. Raises ConfigError for another level, and in a multi-host job."""
        check_level(level)
        self._check_changeable("sleep")
        with self._changing("sleep"):
            self._core.apply(Sleep())
            self._live.sleep(level)

    def wake_up(self, tags: SequenceOf[str] | None = None) -> None:
        """As `LLM.wake_up`. Raises WeightsError when dropped weights came from arrays, ModelError
        when they cannot be read, OutOfMemoryError; what could not be taken stays asleep."""
        wanted = memory_tags(tags)
        self._check_open()
        with interrupts_held():
            self._live.wake_up(wanted)
            if not self._live.asleep:
                self._core.apply(WakeUp())

    @property
    def asleep(self) -> bool:
        """Whether the engine lacks memory that `sleep` gave back."""
        return self._core.asleep

    def close(self) -> None:
        """Ends the access to the devices. Can be called twice."""
        self._live = None

    @contextlib.contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        """A change that, once begun, ends the engine if it fails: its state is then unknown."""
        try:
            with interrupts_held():
                yield
        except Exception as error:
            self._refuse(f"{what} failed: {type(error).__name__}: {error}")
            raise

    def _check_changeable(self, what: str) -> None:
        self._check_open()
        if self._plan.shapes.placement.streamed:
            weights_on = self._plan.config.weights_on
            raise ConfigError(
                f"{what} is for weights that are all on the device, and weights_on is "
                f"{weights_on!r}; leave weights_on out, or start the engine again."
            )
        if self._num_hosts > 1:
            raise ConfigError(
                f"{what} supports a single process only, and this job has {self._num_hosts}; "
                "give all devices to one process."
            )
