"""What a client with a key learns of, and takes from, those with other keys."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = pytest.mark.attack

PATH = "/v1/completions"
BODY = {"prompt": [7] * 1500, "max_tokens": 1, "temperature": 0}
OTHER = {"authorization": "Bearer accomplice"}


def test_a_prompt_is_cached_for_its_key_alone(attacked):
    """So neither the count nor the time of its prefill tells another key of it."""

    def cached(body, **headers) -> int:
        answer = attacked.post(PATH, body, **headers).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(BODY) == 0
    assert cached(BODY) > 1000
    assert cached(BODY, **OTHER) == 0
    assert cached(BODY | {"cache_salt": "a"}) == 0


def test_the_ids_of_others_are_free(attacked):
    """Neither refused nor answered in their stead."""
    headers = {"x-request-id": "shared"}
    body = {"prompt": "b", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    with ThreadPoolExecutor(1) as pool:
        own = pool.submit(attacked.post, PATH, body, **headers)
        other = attacked.post(PATH, body | {"max_tokens": 2}, **headers, **OTHER)
        assert other.status_code == 200
        assert other.json()["usage"]["completion_tokens"] == 2
        assert own.result().json()["usage"]["completion_tokens"] == 400


def test_no_priority_or_salt_puts_a_client_first(attacked, bystander):
    """Forty requests with salts of their own and every priority that there is; the bystander, who
    has the worst of them, is served in between."""
    body = {"prompt": "c", "max_tokens": 64, "ignore_eos": True, "temperature": 0}
    refused = attacked.post(PATH, body | {"priority": -1})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"
    with ThreadPoolExecutor(40) as pool:
        posts = [
            pool.submit(attacked.post, PATH, body | {"cache_salt": f"{i}", "priority": i % 7})
            for i in range(40)
        ]
        while not all(post.done() for post in posts):
            bystander.check()
    assert {post.result().status_code for post in posts} == {200}
