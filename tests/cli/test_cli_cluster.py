"""`jaxserve cluster` and servers that have no replicas, or refuse, or are not there."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from jaxserve.cli import main
from jaxserve.cli.cluster import described

REPLICA = {
    "index": 0,
    "role": "any",
    "state": "ready",
    "since_s": 1000.0,
    "process": "process 7 on here",
    "model": "tiny",
    "fingerprint": "0123456789",
    "version": "0.2",
    "num_requests": 2,
    "num_sequences": 3,
    "max_num_seqs": 4,
    "num_used_pages": 5,
    "num_pages": 40,
    "num_finished": 2,
    "num_losses": 1,
    "sizes": "tensor_parallel_size 1",
}
RESTART = {"running": False, "num_restarted": 1, "num_replicas": 2, "error": "it is lost."}


@pytest.fixture
def server():
    """Answers each request with the status and body that it is given."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.asked.append((self.command, self.path, self.headers.get("Authorization")))
            status, body = self.server.answer
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        do_POST = do_GET

        def log_message(self, *arguments):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked, server.url = [], f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def run(capsys, *args):
    status = main(["cluster", *args])
    return status, *capsys.readouterr()


def test_a_server_that_is_not_there(capsys):
    status, _, told = run(capsys, "status", "--base-url=http://127.0.0.1:9")
    assert status == 1 and "http://127.0.0.1:9 cannot be reached" in told
    with pytest.raises(SystemExit):
        main(["cluster", "status", "--base-url=127.0.0.1:9"])
    assert "--base-url is '127.0.0.1:9'; start it with http://" in capsys.readouterr().err


def test_a_server_of_one_engine(capsys, server):
    server.answer = 404, {}
    status, _, told = run(capsys, "status", f"--base-url={server.url}/v1", "--api-key=k")
    assert status == 1 and "start it with `jaxserve serve --data-parallel-size`" in told
    assert server.asked == [("GET", "/cluster/status", "Bearer k")]


def test_a_refusal_is_the_servers(capsys, server):
    server.answer = 409, {"error": {"message": "a rolling restart is going on"}}
    status, _, told = run(capsys, "restart", f"--base-url={server.url}")
    assert status == 1 and told.endswith("/cluster/restart: a rolling restart is going on\n")


def test_a_restart_that_ended_early_fails(capsys, server):
    server.answer = 200, {"replicas": [REPLICA], "restart": RESTART}
    status, _, told = run(capsys, "restart", f"--base-url={server.url}")
    assert status == 1 and "1 of 2 replicas were restarted, then: it is lost." in told


def test_a_resize_tells_the_mesh_and_who_waited(capsys, server):
    done = {"running": False, "replica": 1, "sizes": "tensor_parallel_size 2", "took_s": 4.25}
    done |= {"num_kept": 3, "num_cut": 0, "error": None}
    server.answer = 200, {"replicas": [REPLICA], "restart": None, "resize": done}
    options = "--replica=1", "--tensor-parallel-size=2", f"--base-url={server.url}"
    status, told, _ = run(capsys, "resize", *options)
    assert status == 0 and told == (
        "replica 1 has tensor_parallel_size 2 after 4.2 s; 3 requests waited for it with their KV\n"
    )
    assert server.asked == [("POST", "/cluster/resize", None)]
    server.answer[1]["resize"] = done | {"num_cut": 2}
    assert "or some of it, was computed again: 2; half" in run(capsys, "resize", *options)[1]
    server.answer[1]["resize"] = done | {"error": "it failed to load"}
    status, _, told = run(capsys, "resize", *options)
    assert status == 1 and "replica 1 was not resized: it failed to load" in told
    last = described(server.answer[1], 1075.2).splitlines()[-1]
    assert last == (
        "the latest resize of replica 1 to tensor_parallel_size 2 took 4.2 s: it failed to load"
    )


def test_the_status_as_a_table_and_as_json(capsys, server):
    server.answer = 200, {"replicas": [REPLICA], "restart": RESTART}
    status, told, _ = run(capsys, "status", f"--base-url={server.url}", "--json")
    assert status == 0 and json.loads(told) == server.answer[1]
    head, row, last = described(server.answer[1], 1075.2).splitlines()
    assert head.split()[:3] == ["replica", "role", "state"]
    for word in ("0 (process 7 on here)", "ready", "0:01:15", "3 of 4", "5 of 40", "tiny 01234567"):
        assert f" {word} " in f" {row} "
    assert last == (
        "the latest rolling restart has ended, with 1 of 2 replicas restarted: it is lost."
    )
    bounds = {"min_replicas": 1, "max_replicas": 4, "num_added": 3, "num_removed": 2}
    added = REPLICA | {"process": "", "state": "loading"}
    told = described({"replicas": [added], "restart": None, "scaling": bounds}, 1075.2)
    assert told.splitlines()[1].startswith(f"{REPLICA['index']} (no process yet)")
    assert told.endswith("\nautoscaling of 1 to 4 replicas: 3 added, 2 removed")
