"""GuideLLM, a load generator."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from client_inputs import MODEL

pytestmark = [pytest.mark.clients, pytest.mark.peers]
pytest.importorskip("guidellm")
CLIENT = "guidellm"
REQUESTS = 5


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_load(url, tmp_path, tokenizer_path, route):
    """every request of a streamed load succeeds, chats and completions"""
    report = tmp_path / "report.json"
    target = url.removesuffix("/v1")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "guidellm", "run", "--disable-console"),
            f"--backend=kind=openai_http,target={target},model={MODEL},request_format={route}",
            "--profile=kind=concurrent,streams=2",
            f"--constraint=kind=max_requests,count={REQUESTS}",
            f"--tokenizer=kind=huggingface_auto,model={tokenizer_path}",
            "--data=kind=synthetic_text,prompt_tokens=24,output_tokens=8",
            f"--output=kind=json,path={report}",
        ],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    # Its metrics leave out a request that lies outside of the measured window, if only by order of
    # arrival of two last answers; the scheduler's state counts them all.
    state = benchmark["scheduler_state"]
    counts = ("created_requests", "successful_requests", "errored_requests", "cancelled_requests")
    assert [state[count] for count in counts] == [REQUESTS, REQUESTS, 0, 0]
