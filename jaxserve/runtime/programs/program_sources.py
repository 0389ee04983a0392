"""The source files that determine programs, found by following imports, not listed by hand."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]
_PACKAGE = "jaxserve"
_ROOTS = ("jaxserve.runtime.programs.kinds", "jaxserve.models.registry")
"""Modules of the program functions with their shapes, and of the model families they run."""
_WHOLE_PACKAGES = ("pallas_kernels", "sharding_rules")
"""Packages used only by programs. Kernels are imported by name, which imports do not show."""


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
        unread += (module for module in _imports(path) if module.split(".")[0] == _PACKAGE)
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
    """Names that a file imports: modules, and names that may be submodules or attributes."""
    unseen: list[ast.AST] = [ast.parse(path.read_bytes(), str(path))]
    while unseen:
        node = unseen.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            unseen += node.orelse
        else:  # Statements alone: most nodes are expressions, which import nothing.
            for block in ("body", "orelse", "finalbody", "handlers", "cases"):
                inner = getattr(node, block, ())
                unseen += inner if isinstance(inner, list) else ()
