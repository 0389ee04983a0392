"""A kind of program: everything about the programs of one function, in one object."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import jax
import numpy as np

from jaxserve.runtime.programs.compilation.executables import Programs, ProgramSpec
from jaxserve.runtime.programs.device_state import DeviceState
from jaxserve.runtime.programs.shapes.program import ProgramShapes

Key = TypeVar("Key", bound=Hashable)


class ProgramKind(abc.ABC, Generic[Key]):
    """The programs of one function, one for each of `keys`.

    The function takes `static` arguments, the fields of the device state named by `reads`, and
    arrays shaped as `uploads`. It returns new values of the fields in `replaces`, which are
    donated, then results with the PartitionSpecs `outputs`; a single one is not in a tuple. A
    subclass's `__call__` packs the uploads, for `run`.
    """

    title: ClassVar[str]
    pure: ClassVar[Callable[..., Any]]
    """The function, from its static arguments on."""
    reads: ClassVar[tuple[str, ...]] = ()
    replaces: ClassVar[tuple[str, ...]] = ()
    outputs: ClassVar[tuple[Any, ...]] = ()
    applies_processors: ClassVar[bool] = False
    """Whether the function has logits processors in it, which are not in a program's name."""

    def __init__(self, shapes: ProgramShapes) -> None:
        self.shapes = shapes
        self._executables: dict[Key, jax.stages.Compiled] = {}

    @abc.abstractmethod
    def keys(self) -> Iterable[Key]:
        """What tells the programs of this kind apart."""

    def static(self, key: Key) -> tuple[Any, ...]:
        """First arguments of the function, which are no arrays."""
        return ()

    def function(self, key: Key) -> Callable[..., Any]:
        """The function of a program, of arrays."""
        return functools.partial(type(self).pure, *self.static(key))

    @abc.abstractmethod
    def uploads(self, key: Key) -> tuple[Any, ...]:
        """Shapes of the arguments that are not in the device state."""

    def of_state(self, key: Key) -> tuple[Any, ...]:
        """Shapes of the arguments that are in the device state, which come first."""
        return tuple(getattr(self.shapes.abstract_state, field) for field in self.reads)

    @property
    def donated(self) -> tuple[int, ...]:
        """Positions of the arguments that the results replace."""
        return tuple(map(self.reads.index, self.replaces))

    def output_specs(self, key: Key) -> Any:
        """PartitionSpecs of all that the function returns."""
        state = self.shapes.abstract_state
        replaced = (partition_specs(getattr(state, field)) for field in self.replaces)
        outputs = (*replaced, *self.outputs)
        return outputs if len(outputs) > 1 else outputs[0]

    def name(self, key: Key) -> str:
        """Name of a program, unique among all kinds."""
        return f"{self.title}-{key}"

    def spec(self, key: Key) -> ProgramSpec:
        """A program, not compiled."""
        return ProgramSpec(
            self.name(key),
            self.function(key),
            functools.partial(self._arguments, key),
            donated=self.donated,
            outputs=self.output_specs(key),
            cached_by_name=not (self.applies_processors and self.shapes.processors.names),
        )

    def _arguments(self, key: Key) -> tuple[Any, ...]:
        """Shapes of all arguments but the static ones."""
        return *self.of_state(key), *self.uploads(key)

    def bind(self, programs: Programs) -> None:
        """Makes the kind callable. Raises ProgramMissError when one of its programs is missing."""
        self._executables = {key: programs[self.name(key)].call for key in self.keys()}

    def run(self, state: DeviceState, key: Key, *uploads: Any) -> Any:
        """Calls a program, replaces fields of `state`, and returns the results."""
        read = (getattr(state, field) for field in self.reads)
        results = self.call(key, *read, *uploads)
        count = len(self.replaces)
        if count + len(self.outputs) == 1:
            results = (results,)
        for field, value in zip(self.replaces, results):
            setattr(state, field, value)
        return results[count] if len(self.outputs) == 1 else results[count:]

    def call(self, key: Key, *arguments: Any) -> Any:
        """Calls a program with all its arguments: only `run`, and kinds of PartKind, do."""
        return self._executables[key](*arguments)


class PartKind(ProgramKind[Key]):
    """A kind whose programs take parts of the device state, such as one layer's pages, or none of
    it. The same program serves several parts, so the caller passes the part to `call`, and puts
    what it returns in the place of what was donated.

    A subclass gives the shapes of the part, if it takes one, by `of_state`; on a mesh also
    `output_specs`.
    """

    donated: ClassVar[tuple[int, ...]] = ()

    def output_specs(self, key: Key) -> Any:
        return None


def partition_specs(arrays: Any) -> Any:
    """PartitionSpecs of placed arrays; None without a mesh."""
    return jax.tree.map(lambda array: getattr(array.sharding, "spec", None), arrays)


def padded(values: Sequence[int], size: int, padding: int) -> np.ndarray:
    """`values` as int32 [size], filled up with `padding`."""
    array = np.full(size, padding, np.int32)
    array[: len(values)] = values
    return array
