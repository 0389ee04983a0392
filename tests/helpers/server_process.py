"""`jaxserve serve` in a process of its own, as people run it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from patience import PATIENCE_S
from prometheus_client.parser import text_string_to_metric_families
from tiny_checkpoints import CONFIG, random_tensors, write_hf

SETTINGS = (
    "--max-num-seqs=4",
    "--max-num-batched-tokens=36",
    "--page-size=16",
    f"--kv-cache-memory-bytes={8 << 20}",
)
READY_S = 1000
CONTEXT = 2048
TEMPLATE = (
    "{% if tools %}<tool_call> {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
_JAXSERVE = (sys.executable, "-m", "jaxserve")


class ServerProcess:
    """A server on a free port of loopback; `log` is the file with its standard error, and `launch`
    the command that starts it on several hosts. `program` is the command line's, or one that
    breaks it."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *args: str,
        launch: tuple[str, ...] = (),
        program: tuple[str, ...] = _JAXSERVE,
    ) -> None:
        self.log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*program, *launch, "serve", str(model), "--port=0", *SETTINGS, *args],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        self.port = self._port()  # 0 on a Unix socket
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE_S)

    def wait_ready(self) -> ServerProcess:
        self._until(lambda: self.client.get("/health").status_code == 200, READY_S)
        return self

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.client.post(path, json=body, headers=headers)

    def complete(self, body: Any) -> dict[str, Any]:
        """The answer of /v1/completions, which must be good."""
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, body: Any) -> list[dict[str, Any]]:
        """The events of a stream, which must end as streams do."""
        with self.client.stream("POST", path, json=body) as response:
            assert response.status_code == 200, response.read()
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def metrics(self) -> dict[tuple[str, ...], float]:
        """Samples by name and the values of their labels, but for the model's name."""
        samples = {}
        for family in text_string_to_metric_families(self.client.get("/metrics").text):
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
                samples[(sample.name, *labels.values())] = sample.value
        return samples

    def wait_idle(self, within_s: float = PATIENCE_S) -> None:
        """Until nothing runs, waits, or holds pages."""

        def idle() -> bool:
            metrics = self.metrics()
            names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
            held = [metrics[name,] for name in (*names, "jaxserve:open_sequences")]
            return not any(held) and not metrics["jaxserve:kv_pages", "used"]

        self._until(idle, within_s)

    def stop(self, number: int = signal.SIGTERM, within_s: float = PATIENCE_S) -> int:
        """The exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(within_s)
        finally:
            self.process.kill()
            self.process.wait()
            self.client.close()

    def text(self) -> str:
        return self.log.read_text()

    def wait_logged(self, words: str) -> None:
        """Until a line with these words is in the log. That of a request follows its response."""
        self._until(lambda: words in self.text(), PATIENCE_S)

    def _port(self) -> int:
        found: list[re.Match[str]] = []

        def listening() -> bool:
            address = r"listening on (?:https?://127\.0\.0\.1:(\d+)|unix:)"
            found[:] = re.finditer(address, self.text())
            return bool(found)

        self._until(listening, READY_S)
        return int(found[0][1] or 0)

    def _until(self, condition, within_s: float) -> None:
        give_up = time.monotonic() + within_s
        while True:
            runs = self.process.poll() is None  # Before: its last words may meet the condition.
            if condition():
                return
            assert runs and time.monotonic() < give_up, self.text()
            time.sleep(0.05)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Token ids of which no two seeds begin alike."""
    return [3 + (seed * 7 + place * (seed + 3)) % 250 for place in range(length)]


def write_chat_model(directory: Path, template: str = TEMPLATE) -> Path:
    """A random model with a vocabulary of bytes, and a chat template with tools, whose answers are
    short unless asked to be long."""
    config = CONFIG | {"max_position_embeddings": CONTEXT}
    model = write_hf(directory / "m", config, random_tensors(config))
    (model / "generation_config.json").write_text(json.dumps({"max_new_tokens": 32}))
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return model
