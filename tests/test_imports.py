"""Who may import whom: the table of docs/architecture.md, checked against every import."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxserve", "pallas_kernels", "sharding_rules")
OF_EXTRAS = {"ray_replicas": "ray"}
"""Modules that import a package which may not be installed."""


class Room(NamedTuple):
    paths: tuple[str, ...]
    allowed: frozenset[str]
    jax: str
    """Whether its modules bring in JAX: "no", "yes", or the names of those that do."""

    def without_jax(self, module: str) -> bool:
        return self.jax == "no" or not (
            self.jax == "yes"
            or any(module.endswith(f".{name}") for name in re.findall(r"`(.+?)`", self.jax))
        )


def name_of(path: str) -> str:
    """How the table's last column calls a room: `jaxserve/kv/` is `kv`."""
    return path.removeprefix("jaxserve/").removesuffix("/").removesuffix(".py")


def rooms() -> list[Room]:
    text = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(
        r"^\| (`.*?) \| .*? \| (.*?) \| ?(.*?) ?\|$", text[text.index("## Code layout") :], re.M
    )
    table = [
        Room(
            tuple(re.findall(r"`(.+?)`", paths)),
            frozenset(re.findall(r"`(.+?)`", allowed)),
            jax,
        )
        for paths, jax, allowed in rows
        if paths.startswith(tuple(f"`{package}/" for package in PACKAGES))
    ]
    assert len(table) > 15
    return table


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def room_of(module: str) -> str:
    """The name of the room that a module is in, "" for the package itself, which is lazy."""
    path = MODULES[module].relative_to(ROOT).as_posix()
    names = [p for room in rooms() for p in room.paths if path == p or path.startswith(p)]
    assert names or path == "jaxserve/__init__.py", f"{path} is in no room of the table"
    return name_of(names[0]) if names else ""


def imports(module: str) -> Iterator[str]:
    """Modules of ours that a module imports anywhere in its file, also for type checkers."""
    for node in ast.walk(ast.parse(MODULES[module].read_bytes())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in names]
        yield from (name for name in names if name in MODULES)


def test_rooms_import_only_rooms_above_them():
    above: set[str] = set()
    for room in rooms():
        assert room.allowed <= above, f"{room.paths} names rooms below it"
        above |= {name_of(path) for path in room.paths}


def test_every_import_is_one_that_the_table_allows():
    allowed = {name_of(path): room for room in rooms() for path in room.paths}
    used: dict[str, set[str]] = {name: set() for name in allowed}
    for module in MODULES:
        here = room_of(module)
        if not here:
            continue
        room = allowed[here]
        for other in imports(module):
            there = room_of(other)
            if there == here or any(name_of(path) == there for path in room.paths):
                continue
            assert there in room.allowed, f"{module} imports {other}"
            used[here].add(there)
    unused = {
        (room.paths, name)
        for room in rooms()
        for name in room.allowed
        if not any(name in used[name_of(path)] for path in room.paths)
    }
    assert not unused, "arrows of the table that no import uses"


def circle(graph: dict[str, set[str]]) -> tuple[str, ...]:
    """Names that lead from one back to itself; empty if none do."""
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> tuple[str, ...]:
        if name in path:
            return (*path[path.index(name) :], name)
        if name not in done:
            for other in sorted(graph[name]):
                if found := visit(other, (*path, name)):
                    return found
            done.add(name)
        return ()

    return next(filter(None, (visit(name, ()) for name in graph)), ())


def test_no_modules_import_each_other_in_a_circle():
    assert not circle({module: set(imports(module)) for module in MODULES})


def test_no_folders_of_a_package_import_each_other_in_a_circle():
    """A folder counts as one with all that is in it, as does a module beside it."""
    for package in {module.rpartition(".")[0] for module in MODULES} - {"", "jaxserve"}:
        begin = len(package) + 1
        graph: dict[str, set[str]] = {}
        for module in MODULES:
            if module.startswith(f"{package}."):
                here = module[begin:].partition(".")[0]
                others = (o[begin:] for o in imports(module) if o.startswith(f"{package}."))
                graph.setdefault(here, set()).update(o.partition(".")[0] for o in others)
        for name, others in graph.items():
            others.discard(name)
        assert not circle(graph), package


def imported_with(names: list[str]) -> set[str]:
    """Top-level modules that importing `names` in a fresh interpreter brings in."""
    script = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    script += "".join(f"import {name}\n" for name in names)
    script += "print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_modules_without_jax_run_where_it_is_missing():
    """Directly or through others: `None` in sys.modules makes an import fail."""
    host_only = [module for module in MODULES if without_jax(module)]
    assert len(host_only) > 100
    assert {"jaxserve.engine.engine_core", "jaxserve.engine.snapshot.snapshots"} <= {*host_only}
    script = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    script += "sys.modules |= dict.fromkeys(['jax', 'jaxlib', 'flax'])\n"
    script += "".join(f"import {name}\n" for name in host_only)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def without_jax(module: str) -> bool:
    name = room_of(module)
    return any(
        room.without_jax(module)
        for room in rooms()
        if name in (name_of(path) for path in room.paths)
    )


@pytest.mark.parametrize("room", [room for room in rooms() if room.jax.startswith("`")])
def test_modules_said_to_bring_in_jax_do(room):
    """Or else the table would excuse what needs no excuse."""
    package = room.paths[0].removesuffix("/").replace("/", ".")
    for name in re.findall(r"`(.+?)`", room.jax):
        if name in OF_EXTRAS and find_spec(OF_EXTRAS[name]) is None:
            continue
        assert "jax" in imported_with([f"{package}.{name}"])


@pytest.mark.parametrize("package", ["pallas_kernels", "sharding_rules"])
def test_kernels_and_sharding_rules_import_no_jaxserve(package):
    found = imported_with([module for module in MODULES if module.startswith(package)])
    assert {"jax", package} <= found
    assert "jaxserve" not in found


def code_outside_the_packages() -> list[tuple[str, str]]:
    """Python that no test of its own imports, by name: benchmarks, and cells of notebooks."""
    found = [
        (str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "benchmarks").rglob("*.py"))
    ]
    for path in sorted((ROOT / "colab").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        lines = [line for cell in cells if cell["cell_type"] == "code" for line in cell["source"]]
        code = (re.sub(r"^(\s*)[%!].*", r"\1pass", line.rstrip("\n")) for line in lines)
        found.append((path.name, "\n".join(code)))
    return found


def bound_in(path: Path) -> set[str]:
    """Names that a module's body binds, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Import(names=imported) | ast.ImportFrom(names=imported):
                names |= {alias.asname or alias.name for alias in imported}
    return names


@pytest.mark.parametrize(
    "code", [pytest.param(code, id=name) for name, code in code_outside_the_packages()]
)
def test_what_benchmarks_and_notebooks_import_exists(code):
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    for node in imports:
        if node.module not in MODULES or node.module == "jaxserve":  # That one looks names up.
            assert not str(node.module).startswith(tuple(f"{name}." for name in PACKAGES))
            continue
        names = {alias.name for alias in node.names} - bound_in(MODULES[node.module])
        assert {f"{node.module}.{name}" for name in names} <= set(MODULES)
