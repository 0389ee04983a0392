"""Who may know of whom: policies and bookkeeping know no JAX, kernels and rules no jaxserve."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def modules(package: str) -> list[str]:
    paths = sorted((ROOT / package).rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return [name.removesuffix(".__init__") for name in names]


HOST_ONLY = [
    *sorted(set(modules("jaxserve/engine")) - {"jaxserve.engine.engine", "jaxserve.engine.steps"}),
    *modules("jaxserve/kv"),
    *modules("jaxserve/loadgen"),
    *modules("jaxserve/offline"),
    *modules("jaxserve/structured"),
    *modules("jaxserve/text"),
    "jaxserve.sampling_params",
    "jaxserve.outputs",
    "jaxserve.errors",
]
APART = [*modules("pallas_kernels"), *modules("sharding_rules")]


def imported_with(names: list[str]) -> set[str]:
    """Top-level modules that importing `names` in a fresh interpreter brings in."""
    script = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    script += "".join(f"import {name}\n" for name in names)
    script += "print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_policies_and_bookkeeping_import_no_jax():
    assert {"jaxserve.engine.scheduler", "jaxserve.kv.pages"} <= set(HOST_ONLY)
    found = imported_with(HOST_ONLY)
    assert "jaxserve" in found
    assert not found & {"jax", "jaxlib", "flax"}


def test_kernels_and_sharding_rules_import_no_jaxserve():
    found = imported_with(APART)
    assert {"jax", "pallas_kernels", "sharding_rules"} <= found
    assert "jaxserve" not in found


def test_the_engine_itself_does_import_jax():
    """Or else the tests above would prove nothing."""
    assert "jax" in imported_with(["jaxserve.engine.engine"])
