"""Some hundreds of requests of every kind leave a server as it was."""

from __future__ import annotations

import pytest
from serve_soak import soak

pytestmark = pytest.mark.interfaces

REQUESTS = 400


def test_nothing_is_left_of_requests(server):
    url = f"http://127.0.0.1:{server.port}"
    before = server.metrics()["process_open_fds",]
    found = soak(url, REQUESTS)
    assert set(found.ended) == {"200", "400", "hung up"}
    assert sum(found.ended.values()) == REQUESTS
    assert not any(found.left.values())
    assert server.metrics()["process_open_fds",] <= before + 2
    assert found.slope_bytes < 100_000
