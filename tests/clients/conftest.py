"""One server of the default model for all clients, and the page that says what passed.

The clients are unmodified and from the package index: `pip install -e '.[test,clients]'`, then
`pytest -n 0 -m 'clients and not peers' tests/clients`; those that need torch come with [peers] and
run with `-m peers`. With `--write-compatibility` the rows of docs/compatibility.md are written from
what passed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import compatibility
from client_inputs import MODEL
from server_process import ServerProcess


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-compatibility", action="store_true", help=compatibility.__doc__)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-compatibility", False):
        config.pluginmanager.register(compatibility.Writer())


@pytest.fixture(scope="session")
def shared_server(
    smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("clients") / "log"
    server = ServerProcess(
        smollm2_path,
        log,
        *(f"--served-model-name={MODEL}", "--max-model-len=2048", "--max-num-seqs=8"),
        *("--max-num-batched-tokens=136", f"--kv-cache-memory-bytes={512 << 20}"),
        "--log-requests",
    )
    yield server.wait_ready()
    assert server.stop() == 0, server.text()
    assert "Traceback" not in server.text()


@pytest.fixture
def server(shared_server: ServerProcess) -> Iterator[ServerProcess]:
    """The server, which a test leaves idle."""
    yield shared_server
    shared_server.wait_idle()


@pytest.fixture
def url(server: ServerProcess) -> str:
    return f"http://127.0.0.1:{server.port}/v1"


@pytest.fixture(scope="session")
def tokenizer_path(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's tokenizer as a directory of Hugging Face's, for load generators."""
    from jaxserve.models.loading.checkpoint import open_checkpoint

    directory = tmp_path_factory.mktemp("tokenizer")
    open_checkpoint(smollm2_path).tokenizer().save(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return directory
