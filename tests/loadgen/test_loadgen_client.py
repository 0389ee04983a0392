"""One request each, against real HTTP: what is timed, counted, and called a failure."""

from __future__ import annotations

import asyncio

import pytest
import scripted_server
from patience import PATIENCE_S

from jaxserve.loadgen.client import open_session, spread, stream
from jaxserve.loadgen.endpoint import LoadEndpoint

GAP_US = round(scripted_server.GAP_S * 1e6)
USAGE = {"stream_options": {"include_usage": True}}
TOKENS = 7


def ask(server, model, kind="completions", timeout_s=PATIENCE_S, **fields):
    async def run():
        endpoint = LoadEndpoint(f"{server}/v1", kind, model, fields)
        async with open_session(None, timeout_s) as http:
            return await stream(http, endpoint.url, endpoint.body("some words", TOKENS))

    return asyncio.run(run())


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_every_token_has_its_time(server, kind):
    answer = ask(server, "plain", kind, **USAGE)
    assert answer.failure is None
    assert len(answer.token_us) == answer.output_tokens == TOKENS
    assert (answer.prompt_tokens, answer.cached_tokens) == (3 + 2 * 2, 1)
    # The server sleeps before each; it may be late but never early.
    assert all(us >= GAP_US * place for place, us in enumerate(answer.token_us, start=1))
    assert list(answer.token_us) == sorted(answer.token_us)
    assert answer.token_us[-1] <= answer.end_us


@pytest.mark.parametrize(
    ("model", "fields"), [("bundled", USAGE), ("with_ids", {"return_token_ids": True})]
)
def test_tokens_that_come_together_are_counted_one_by_one(server, model, fields):
    answer = ask(server, model, **fields)
    assert answer.failure is None
    assert len(answer.token_us) == TOKENS
    times = sorted(set(answer.token_us))
    assert len(times) == 3
    if model == "with_ids":
        assert [answer.token_us.count(us) for us in times] == [3, 3, 1]


def test_without_usage_an_event_is_a_token(server):
    answer = ask(server, "no_usage", **USAGE)
    assert answer.failure is None
    assert len(answer.token_us) == TOKENS
    assert answer.prompt_tokens is answer.output_tokens is None


@pytest.mark.parametrize(
    ("model", "failure", "detail", "tokens"),
    [
        ("busy", "HTTP 429", "too many requests", 0),
        ("broken", "HTTP 500", "it is broken", 0),
        ("breaks", "stream broken off", "", 2),
        ("stops_short", "stream broken off", "finish_reason", 2),
        ("error_event", "error event", "out of luck", 1),
        ("garbage", "unreadable event", "{not json", 1),
        ("empty", "no tokens", None, 0),
    ],
)
def test_each_way_to_fail_has_its_name(server, model, failure, detail, tokens):
    answer = ask(server, model)
    assert answer.failure == failure
    assert len(answer.token_us) == tokens
    assert answer.detail is None if detail is None else detail in answer.detail


def test_an_answer_that_takes_too_long_has_failed(server):
    answer = ask(server, "hangs", timeout_s=2)
    assert (answer.failure, len(answer.token_us)) == ("timeout", 1)
    # The clock of timeouts is another one, and may be a little ahead.
    assert 1_900_000 < answer.end_us < scripted_server.SLOW_S * 1e6
    assert " 2 s" in answer.detail


def test_no_server_listens():
    answer = ask("http://127.0.0.1:9", "plain")
    assert answer.failure == "no connection"
    assert answer.detail


@pytest.mark.parametrize(
    ("event_us", "num_tokens", "expected"),
    [
        ([], 3, ()),
        ([5, 6, 7], 3, (5, 6, 7)),
        ([5, 9], 5, (5, 5, 5, 9, 9)),
        ([5, 6, 7, 8], 2, (5, 7)),
        ([5], 3, (5, 5, 5)),
    ],
)
def test_tokens_are_dealt_out_to_events(event_us, num_tokens, expected):
    assert spread(event_us, num_tokens) == expected
