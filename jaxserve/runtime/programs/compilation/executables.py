"""Ahead-of-time compiled programs: specs, parallel compilation or loading, executables."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxserve.core.errors import ProgramMissError
from jaxserve.runtime.programs.compilation.executable_cache import ExecutableCache
from pallas_kernels import self_check
from pallas_kernels.backends import fell_back_for_now
from pallas_kernels.platforms import lowering_for


@dataclasses.dataclass(frozen=True)
class ProgramSpec:
    """An uncompiled program: a pure function, its argument shapes, the arguments it donates.

    `arguments` returns trees of jax.ShapeDtypeStruct: only what is lowered needs them, and those
    that are results of other programs take a trace to know. `donated` are positions of donated
    arguments. With arguments on a mesh, the function runs per device on its shards (shard_map), and
    `outputs` are the PartitionSpecs of its results. `cached_by_name`: the name and the engine's
    description determine the program; one with a caller's functions must be lowered to be found.
    `elsewhere`: the device that it runs on, if that is none of the engine's.
    """

    name: str
    function: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    donated: tuple[int, ...] = ()
    outputs: Any = None
    cached_by_name: bool = True
    elsewhere: jax.Device | None = None

    def lower(self) -> jax.stages.Lowered:
        arguments = self.arguments()
        with lowering_for(_sharding(arguments)):
            return self._jitted(arguments).lower(*arguments)

    def results(self) -> Any:
        """Shapes of the results."""
        arguments = self.arguments()
        with lowering_for(_sharding(arguments)):
            return jax.eval_shape(self._jitted(arguments), *arguments)

    def _jitted(self, arguments: tuple[Any, ...]) -> Any:
        function, sharding = self.function, _sharding(arguments)
        if isinstance(sharding, NamedSharding):
            function = jax.shard_map(
                function,
                mesh=sharding.mesh,
                in_specs=jax.tree.map(lambda array: array.sharding.spec, arguments),
                out_specs=self.outputs,
                check_vma=False,
            )
        return jax.jit(function, donate_argnums=self.donated)


def _sharding(arguments: tuple[Any, ...]) -> jax.sharding.Sharding:
    """Of one of the arguments, whose devices are those of all."""
    return jax.tree.leaves(arguments)[0].sharding


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program. `temp_bytes` is its scratch memory, without arguments and results, and
    `output_bytes` that of its results; both 0 of one that runs on none of the engine's devices."""

    name: str
    call: jax.stages.Compiled
    temp_bytes: int
    output_bytes: int
    from_cache: bool


class Programs(Mapping[str, Program]):
    """All compiled programs by name. Looking up any other name raises ProgramMissError."""

    def __init__(self, programs: Iterable[Program]) -> None:
        self._programs = {program.name: program for program in programs}

    def __getitem__(self, name: str) -> Program:
        try:
            return self._programs[name]
        except KeyError:
            raise ProgramMissError(
                f"no program {name!r} was compiled; there are {', '.join(self._programs)}."
            ) from None

    def __iter__(self):
        return iter(self._programs)

    def __len__(self) -> int:
        return len(self._programs)

    @property
    def temp_bytes(self) -> int:
        """Largest scratch memory of any program: steps run one after another."""
        return max(program.temp_bytes + program.output_bytes for program in self.values())


class Compilation:
    """Compiles or loads programs in threads while the caller reads weights."""

    def __init__(
        self,
        specs: Iterable[ProgramSpec],
        cache: ExecutableCache | None,
        on_done: Callable[[Program], None] = lambda program: None,
        timed: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
        *,
        one_at_a_time: bool = False,
    ) -> None:
        """`on_done` is called with each finished program; `timed(name)` wraps each actual
        compilation. `one_at_a_time`: where compilers choose by what they measure on the device, as
        for GPUs, which another compilation would disturb. Programs are traced beside that."""
        self._lock = threading.Lock() if one_at_a_time else nullcontext()
        self._pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="jaxserve-compile")
        self._cache, self._on_done, self._timed = cache, on_done, timed
        self._futures: list[Future[Program]] = [self._pool.submit(self._build, s) for s in specs]

    def _build(self, spec: ProgramSpec) -> Program:
        cache = self._cache
        if cache and spec.elsewhere:
            cache = cache.on([spec.elsewhere])
        by_name = cache if spec.cached_by_name else None
        compiled = by_name.load(spec.name) if by_name else None
        from_cache = compiled is not None
        if compiled is None:
            lowered = spec.lower()
            cache = None if fell_back_for_now() else cache
            entry = cache.entry(spec.name, lowered) if cache else None
            compiled = cache.load_entry(spec.name, entry) if cache else None
            from_cache = compiled is not None
            if compiled is None:
                with self._lock, self._timed(spec.name):
                    compiled = lowered.compile()
                if cache:
                    cache.store(spec.name, entry, compiled)
        memory = compiled.memory_analysis()
        here = spec.elsewhere is None
        program = Program(
            name=spec.name,
            call=compiled,
            temp_bytes=here * memory.temp_size_in_bytes,
            output_bytes=here * (memory.output_size_in_bytes - memory.alias_size_in_bytes),
            from_cache=from_cache,
        )
        self._on_done(program)
        return program

    def result(self) -> Programs:
        """Wait for all programs. The first failure is raised, and cancels those not yet started."""
        try:
            return Programs([future.result() for future in self._futures])
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Cancel compilations that have not started, and wait for those that have."""
        self._pool.shutdown(cancel_futures=True)
        self_check.finish()
