"""The source files that determine programs, found by following imports, not listed by hand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[4]
_ROOTS = ("jaxserve.runtime.program_kinds", "jaxserve.models.registry")
"""Modules of the program functions with their shapes, and of the model families they run."""
_WHOLE_PACKAGES = ("pallas_kernels", "sharding_rules")
"""Packages used only by programs. Kernels are imported by name, which imports do not show."""

# Read by expressions, in 0.04 s of each start: Python's parser takes 0.4 s for these files.
_FOR_TYPES = re.compile(r"^if TYPE_CHECKING:.*\n(?:[ \t]+.*\n|\n)*", re.MULTILINE)
_IMPORT = re.compile(
    r"^[ \t]*(?:from (jaxserve[\w.]*) import (\([^)]*\)|.*)|import (jaxserve[\w.]*))",
    re.MULTILINE,
)


def program_sources() -> list[Path]:
    """Files whose change may change a program, sorted: the modules of jaxserve that `_ROOTS`
    import, directly or transitively, and every source and data file of `_WHOLE_PACKAGES`.

    Imports inside functions count; those under TYPE_CHECKING do not.
    """
    modules: dict[str, Path] = {}
    unread = list(_ROOTS)
    while unread:
        name = unread.pop()
        path = _path(name)
        if path is None or name in modules:
            continue
        modules[name] = path
        unread += _parents(name)
        unread += _imports(path)
    files = set(modules.values())
    for package in _WHOLE_PACKAGES:
        for suffix in ("py", "json"):
            files |= set((_ROOT / package).rglob(f"*.{suffix}"))
    return sorted(files)


def _path(name: str) -> Path | None:
    """The file of a module; None for a name that is not a module, such as an imported function."""
    path = _ROOT.joinpath(*name.split("."))
    candidates = (path / "__init__.py", path.with_suffix(".py"))
    return next((file for file in candidates if file.is_file()), None)


def _parents(name: str) -> list[str]:
    """Parent packages, which are imported before a module."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _imports(path: Path) -> Iterator[str]:
    """Names that a file imports of jaxserve: modules, and names that may be submodules or
    attributes."""
    for found in _IMPORT.finditer(_FOR_TYPES.sub("", path.read_text(encoding="utf-8"))):
        module, names, alone = found.groups()
        if alone:
            yield alone
            continue
        yield module
        yield from (f"{module}.{name}" for name in re.findall(r"\w+", names))
