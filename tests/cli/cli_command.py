"""Running `jaxserve` as a user does, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from patience import PATIENCE_S

CONTEXT = 8192
# The fewest and smallest programs: one sequence, one prefill bucket.
SETTINGS = ("--max-num-seqs=1", "--max-num-batched-tokens=33", "--page-size=64")

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


class Run(NamedTuple):
    """A command that ended."""

    status: int
    stdout: str
    stderr: str

    def assert_error(self, *words: str) -> None:
        """Exit status 1 and one `error:` line that holds `words`."""
        assert self.status == 1, self.stderr
        errors = [line for line in self.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, self.stderr
        assert all(word in errors[0] for word in words), errors[0]
        assert "Traceback" not in self.stderr


class Command:
    """`jaxserve` with a cache directory of its own."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache

    def start(self, *args: str | Path) -> subprocess.Popen[bytes]:
        """A process that runs, its three streams being pipes."""
        return subprocess.Popen(
            [sys.executable, "-m", "jaxserve", *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"JAXSERVE_CACHE": str(self.cache), "PYTHONIOENCODING": "utf-8"},
        )

    def __call__(self, *args: str | Path, stdin: str = "") -> Run:
        process = self.start(*args)
        stdout, stderr = process.communicate(stdin.encode(), timeout=PATIENCE_S)
        return Run(process.returncode, stdout.decode(), stderr.decode())
