"""Time until ready, cold (every program compiled) and warm (every program loaded).

Each start is a new process, as for a user; the cold one gets an empty program cache. The model file
is fetched before the clock starts.

    python benchmarks/startup.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from table import print_table

from jaxserve.models.loading.fetch import default_model_path

_CHILD = """
import json, sys
from jaxserve import LLM, SamplingParams
with LLM(sys.argv[1]) as llm:
    metrics = llm.get_metrics()
    print(json.dumps({
        "compiled": metrics["jaxserve:programs_compiled_total"].value,
        "phases": metrics["jaxserve:startup_seconds"].value,
    }))
"""


def start(model: Path, cache: str) -> tuple[float, dict]:
    """Seconds from launching a Python to its engine being ready, and what it says of it."""
    begin = time.perf_counter()
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, str(model)],
        env=os.environ | {"JAXSERVE_CACHE": cache},
        stdout=subprocess.PIPE,
        check=True,
    )
    return time.perf_counter() - begin, json.loads(child.stdout)


def main() -> None:
    model = default_model_path()
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm", "warm again"):
            seconds, said = start(model, cache)
            phases = said["phases"]
            rows.append(
                (name, seconds, *(float(phases[p]) for p in _PHASES), int(said["compiled"]))
            )
    ratio = rows[0][1] / min(row[1] for row in rows[1:])
    print_table(
        f"Seconds from process start to ready; cold is {ratio:.1f} times warm",
        ("start", "total", *_PHASES, "programs compiled"),
        rows,
    )


_PHASES = ("plan", "weights", "programs", "memory")

if __name__ == "__main__":
    main()
