"""Programs compiled at their first call.

A tiny engine has some thirty programs, of which a test runs half, and to compile one takes longer
than to run it for the whole test. The product compiles all before the first request; tests of that
use the fixture `ahead_of_time`.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxserve.runtime.programs.compilation.executable_cache import ExecutableCache
from jaxserve.runtime.programs.compilation.executables import Compilation, Program, ProgramSpec

MAX_LOADED = 300
"""Executables kept: each has some 70 memory maps, and a process may have 65,530."""
_build = Compilation._build
_read = ExecutableCache._read
_store = ExecutableCache.store
_loaded: collections.OrderedDict[tuple[int, int], jax.stages.Compiled | None]
_loaded = collections.OrderedDict()
_files: dict[Hashable, Path] = {}
"""Where an executable is, by what its program is made of."""
_thread = threading.local()


class _OnDemand:
    """An executable that is compiled when it is first called."""

    def __init__(self, compilation: Compilation, spec: ProgramSpec) -> None:
        self._compilation, self._spec = compilation, spec
        self._compiled: Program | None = None
        self._lock = threading.Lock()

    def compile(self) -> Program:
        with self._lock:
            if self._compiled is None:
                _thread.compiles = True
                try:
                    self._compiled = _build_once(self._compilation, self._spec)
                finally:
                    _thread.compiles = False
            return self._compiled

    def __call__(self, *arguments: Any) -> Any:
        return (self._compiled or self.compile()).call(*arguments)


def is_compiling() -> bool:
    """Whether this thread compiles what the product would have compiled at its start."""
    return getattr(_thread, "compiles", False)


def _postpone(compilation: Compilation, spec: ProgramSpec) -> Program:
    return Program(spec.name, _OnDemand(compilation, spec), 0, 0, from_cache=False)


def _build_once(compilation: Compilation, spec: ProgramSpec) -> Program:
    """Engines of one process whose settings differ have many programs in common. The product lowers
    each of them to find that out; here one is found by its function and arguments."""
    cache = compilation._cache
    if cache is None or not spec.cached_by_name or spec.elsewhere:
        return _build(compilation, spec)
    file = cache.directory / spec.name
    if file.exists():
        return _build(compilation, spec)
    arrays, tree = jax.tree.flatten(spec.arguments())
    key = (
        *(spec.name, _identity_of(spec.function), spec.donated, repr(spec.outputs), tree),
        *((array.shape, array.dtype, array.weak_type, repr(array.sharding)) for array in arrays),
        *(cache._lowered, *cache._devices),
    )
    if key in _files:
        cache._link(_files[key], spec.name)
    program = _build(compilation, spec)
    _files.setdefault(key, file)
    return program


def _identity_of(function: Callable[..., Any]) -> Hashable:
    """Equal for functions of the same code and the same values."""
    if isinstance(function, functools.partial):
        keywords = ((name, _identity_of(value)) for name, value in function.keywords.items())
        return _identity_of(function.func), *map(_identity_of, function.args), *keywords
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if set(names) == {"self", "func"}:  # Decorated by a context manager of contextlib.
        cells = {name: cell.cell_contents for name, cell in zip(names, function.__closure__)}
        manager = cells["self"]
        return manager.func, *manager.args, *manager.kwds.items(), _identity_of(cells["func"])
    return function


def _read_once(cache: ExecutableCache, path: Path) -> jax.stages.Compiled | None:
    """Engines of one process share executables, since to load one takes tens of milliseconds."""
    try:
        file = _identity(path)
    except OSError:
        return None
    if file not in _loaded:
        _keep(file, _read(cache, path))
    _loaded.move_to_end(file)
    return _loaded[file]


def _store_and_keep(
    cache: ExecutableCache, name: str, entry: Path, compiled: jax.stages.Compiled
) -> None:
    """The next engine of this process has it, and not one that is made of the file."""
    _store(cache, name, entry, compiled)
    with contextlib.suppress(OSError):  # It could not be stored.
        _keep(_identity(entry), compiled)


def _identity(path: Path) -> tuple[int, int]:
    """That of all links to a file."""
    stat = path.stat()
    return stat.st_ino, stat.st_mtime_ns


def _keep(file: tuple[int, int], compiled: jax.stages.Compiled | None) -> None:
    _loaded[file] = compiled
    if len(_loaded) > MAX_LOADED:
        _loaded.popitem(last=False)


def install() -> None:
    """Engines made from now on compile their programs on demand, also those of processes that this
    one starts (by sitecustomize.py)."""
    Compilation._build = _postpone
    ExecutableCache._read = _read_once
    ExecutableCache.store = _store_and_keep
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {"TESTS_COMPILE": "on demand", "PYTHONPATH": os.pathsep.join(paths)}


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Engines made meanwhile compile ahead, and so do those of processes started meanwhile."""
    before = Compilation._build, ExecutableCache._read, ExecutableCache.store
    Compilation._build, ExecutableCache._read, ExecutableCache.store = _build, _read, _store
    environment = os.environ.pop("TESTS_COMPILE", None)
    try:
        yield
    finally:
        Compilation._build, ExecutableCache._read, ExecutableCache.store = before
        if environment is not None:
            os.environ["TESTS_COMPILE"] = environment
