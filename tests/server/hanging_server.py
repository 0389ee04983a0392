"""`jaxserve` whose device hangs for as long as there is a file: HANG.N hangs host N.

Usage: hanging_server.py HANG serve MODEL ...
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import jax

from jaxserve.cli import main
from jaxserve.core.steps.results import DispatchedStep, StepResults
from jaxserve.runtime.runner import Runner

_read = Runner.read


def _hanging(runner: Runner, step: DispatchedStep) -> StepResults:
    while Path(f"{sys.argv[1]}.{jax.process_index()}").exists():
        time.sleep(0.05)
    return _read(runner, step)


if __name__ == "__main__":
    Runner.read = _hanging
    sys.exit(main(sys.argv[2:]))
