"""AIPerf, a load generator."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from client_inputs import MODEL

pytestmark = pytest.mark.clients
pytest.importorskip("aiperf")
CLIENT = "aiperf"
REQUESTS = 6
TOKENIZER = "jaxserve/tokenizer"


@pytest.fixture
def hub(tokenizer_path, tmp_path):
    """A cache of the Hugging Face Hub with the tokenizer: offline, AIPerf takes no path."""
    repository = tmp_path / "hub" / f"models--{TOKENIZER.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0")
    shutil.copytree(tokenizer_path, repository / "snapshots" / "0")
    return tmp_path / "hub"


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_load(url, hub, tmp_path, endpoint):
    """every request of a streamed load succeeds, chats and completions"""
    program = Path(sys.executable).with_name("aiperf")
    done = subprocess.run(
        [
            *(program, "profile", f"--model={MODEL}", f"--url={url.removesuffix('/v1')}"),
            *(f"--endpoint-type={endpoint}", "--streaming", f"--tokenizer={TOKENIZER}"),
            *(f"--request-count={REQUESTS}", "--concurrency=2", "--isl=24", "--osl=8"),
            *("--workers-max=1", "--ui=none", f"--artifact-dir={tmp_path / 'found'}"),
        ],
        env=os.environ | {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.rglob("found/**/profile_export_aiperf.json")
    found = json.loads(path.read_text())
    assert found["request_count"]["avg"] == REQUESTS
    assert not found.get("error_summary")
