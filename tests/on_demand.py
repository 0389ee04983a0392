"""Programs compiled at their first call.

A tiny engine has some thirty programs, of which a test runs half, and to compile one takes longer
than to run it for the whole test. The product compiles all before the first request; tests of that
use the fixture `compiled`, which has them compiled ahead.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from jaxserve.runtime.programs.executables import Compilation, Program, ProgramSpec

_build = Compilation._build
_waiting: weakref.WeakSet[_OnDemand] = weakref.WeakSet()


class _OnDemand:
    """An executable that is compiled when it is first called."""

    def __init__(self, compilation: Compilation, spec: ProgramSpec) -> None:
        self._compilation, self._spec = compilation, spec
        self._compiled: Program | None = None
        self._lock = threading.Lock()
        _waiting.add(self)

    def compile(self) -> Program:
        with self._lock:
            if self._compiled is None:
                self._compiled = _build(self._compilation, self._spec)
                _waiting.discard(self)
            return self._compiled

    def __call__(self, *arguments: Any) -> Any:
        return (self._compiled or self.compile()).call(*arguments)


def _postpone(compilation: Compilation, spec: ProgramSpec) -> Program:
    return Program(spec.name, _OnDemand(compilation, spec), 0, 0, from_cache=False)


def install() -> None:
    """Engines made from now on compile their programs on demand."""
    Compilation._build = _postpone


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Compiles what waits for its first call; engines made meanwhile compile ahead."""
    before, Compilation._build = Compilation._build, _build
    for program in list(_waiting):
        program.compile()
    try:
        yield
    finally:
        Compilation._build = before
