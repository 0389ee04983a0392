"""The end of the server that was attacked: nothing is left of it all, and it stops when told to,
however busy it is kept."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from patience import PATIENCE_S
from server_process import prompt_of

pytestmark = pytest.mark.attack

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SLOW = {
    "messages": [{"role": "user", "content": "slow"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
}
LONG = {"prompt": prompt_of(20), "max_tokens": 1900, "ignore_eos": True, "stream": True}


@pytest.fixture
def unnoticed():
    """The bystander is not served by a server that stops."""


def test_nothing_is_left(attacked, bystander):
    bystander.check()
    attacked.wait_idle()
    text = attacked.text()
    assert "Traceback" not in text and "error" not in text.lower().replace("http error", "")


def test_it_stops_while_it_is_kept_busy(attacked, bystander):
    """By templates that take for ever, by streams, and by who never read their answers."""
    bystander.end()
    with ThreadPoolExecutor(40) as pool:
        posts = [pool.submit(attacked.post, CHAT, SLOW) for _ in range(16)]
        posts += [pool.submit(attacked.post, COMPLETIONS, LONG) for _ in range(20)]
        time.sleep(1)
        attacked.process.send_signal(signal.SIGTERM)
        assert attacked.process.wait(PATIENCE_S) == 0, attacked.text()
        for post in posts:
            # 400: the template reached its limit of time before the signal came.
            ended = (200, 400, 429, 500, 503)
            assert post.exception() is not None or post.result().status_code in ended
    assert "Traceback" not in attacked.text()
