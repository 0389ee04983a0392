"""Where a server listens: a Unix socket, with TLS, below a path of a proxy."""

from __future__ import annotations

import socket
import ssl
import subprocess

import httpx
import pytest
from patience import PATIENCE_S
from server_process import ServerProcess

from jaxserve.core.errors import ConfigError
from jaxserve.server.http.listening import listening_on_file

pytestmark = pytest.mark.interfaces

PROMPT = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed certificate of localhost, and its key."""
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", key, "-out", cert),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


def test_tls_and_a_path_of_a_proxy(chat_model, tmp_path, certificate):
    cert, key = certificate
    server = ServerProcess(
        chat_model,
        tmp_path / "log",
        *(f"--ssl-certfile={cert}", f"--ssl-keyfile={key}", f"--ssl-ca-certs={cert}"),
        "--root-path=/llm/",
    )
    url = f"https://127.0.0.1:{server.port}"
    trusting = ssl.create_default_context(cafile=cert)
    with pytest.raises(httpx.HTTPError), httpx.Client(verify=trusting) as stranger:
        stranger.get(f"{url}/health")
    trusting.load_cert_chain(cert, key)
    server.client.close()
    server.client = httpx.Client(base_url=url, verify=trusting, timeout=PATIENCE_S)
    server.wait_ready()
    # Whether or not the proxy removes the path.
    answers = [server.post(f"{path}/v1/completions", PROMPT) for path in ("", "/llm")]
    assert answers[0].json()["choices"] == answers[1].json()["choices"]
    assert server.client.get("/llmless/health").status_code == 404
    assert server.client.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]
    assert server.stop() == 0, server.text()


def test_a_unix_socket(chat_model, tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    server = ServerProcess(chat_model, tmp_path / "log", f"--uds={path}")
    server.client.close()
    transport = httpx.HTTPTransport(uds=str(path))
    server.client = httpx.Client(
        base_url="http://any.name", transport=transport, timeout=PATIENCE_S
    )
    server.wait_ready()
    assert len(server.complete(PROMPT)["choices"]) == 1
    with pytest.raises(ConfigError, match="another server"), listening_on_file(path):
        pass
    assert server.stop() == 0, server.text()
    assert not path.exists()
