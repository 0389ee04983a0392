"""One server for all attacks, and a bystander who must not notice any of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENCE_S
from server_process import TEMPLATE, ServerProcess, write_chat_model

MAX_FILES = 1800
"""That the server may have open, so that it has fewer connections than the 4,096 of others: they
are soon made."""
KEYS = ("attacker", "accomplice", "bystander")
BOUND_S = 30.0
"""How long the bystander may wait for a short answer, if the machine has nothing else to do. It
waits for milliseconds; an attack that succeeds makes it wait for minutes, or for ever."""
# It takes minutes, were there no limit.
SLOW = (
    '{% if messages[0].content == "slow" %}{% for i in range(99999) %}{% for j in range(99999) %}'
    "{% endfor %}{% endfor %}{% endif %}"
)


class Bystander:
    """A client in a process of its own."""

    def __init__(self, port: int, log: Path) -> None:
        self._log = log
        self._seen = 0
        program = Path(__file__).with_name("bystander.py")
        self._process = subprocess.Popen(
            [sys.executable, program, str(port), KEYS[2], log], stdin=subprocess.PIPE
        )

    def check(self) -> None:
        """Every answer since the last check was good, and came in time. Waits for one more."""
        begin = time.monotonic()
        while not (waits := self._waits()) or waits[-1][2] < begin:
            assert self._process.poll() is None, "the bystander has failed"
            assert time.monotonic() - begin < PATIENCE_S, "the bystander still waits"
            time.sleep(0.02)
        new, self._seen = waits[self._seen :], len(waits)
        print(f"the bystander waited for up to {max(each[3] for each in new):.3f} s")
        busy = max(1.0, os.getloadavg()[0] / os.cpu_count())
        late = [each for each in new if each[1] != 200 or each[3] >= BOUND_S * busy]
        assert not late, late

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)

    def _waits(self) -> list[tuple[str, int, float, float]]:
        if not self._log.exists():
            return []
        return [json.loads(line) for line in self._log.read_text().split("\n")[:-1]]


@pytest.fixture(scope="session")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with keys, whose chat template takes for ever for the message "slow". Its client has
    the attacker's key."""
    directory = tmp_path_factory.mktemp("attacked")
    (directory / "keys").write_text("\n".join(KEYS))
    few_files = f'ulimit -n {MAX_FILES}; exec "$0" -m jaxserve "$@"'
    server = ServerProcess(
        write_chat_model(directory, SLOW + TEMPLATE),
        directory / "log",
        f"--api-key-file={directory / 'keys'}",
        "--fair-share",
        "--min-priority=0",
        "--shutdown-timeout=1",
        "--allowed-hosts=inside.example",
        program=("bash", "-c", few_files, sys.executable),
    )
    server.client.headers["authorization"] = f"Bearer {KEYS[0]}"
    yield server.wait_ready()
    server.process.kill()
    server.process.wait()
    server.client.close()


@pytest.fixture(scope="session")
def bystander(attacked: ServerProcess) -> Iterator[Bystander]:
    one = Bystander(attacked.port, attacked.log.with_name("bystander"))
    one.check()
    yield one
    one.end()


@pytest.fixture(autouse=True)
def unnoticed(
    request: pytest.FixtureRequest, attacked: ServerProcess, bystander: Bystander
) -> Iterator[None]:
    """After each attack the server lives, nothing unexpected was logged, and the
    bystander was served in time all along."""
    yield
    if request.node.get_closest_marker("ends_the_server") is None:
        bystander.check()
        assert attacked.process.poll() is None, attacked.text()
        assert "Traceback" not in attacked.text()
