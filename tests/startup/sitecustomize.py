"""Python imports this first in each process, for tests put its directory on PYTHONPATH: processes
that tests start compile programs on demand too, unless `on_demand` says otherwise."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

COMPILES = "jaxserve.runtime.programs.compilation.executables"


class _ThenOnDemand:
    """Finds the module that compiles, and installs `on_demand` once it is imported."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != COMPILES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_install(module: ModuleType) -> None:
            load(module)
            if "on_demand" not in sys.modules:  # A worker of pytest imports and installs it itself.
                import on_demand

                on_demand.install()

        spec.loader.exec_module = load_and_install
        return spec


if os.environ.get("TESTS_COMPILE") == "on demand":
    sys.meta_path.insert(0, _ThenOnDemand())
