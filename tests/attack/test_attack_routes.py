"""Every route there is and many there are not, by every method, with every kind of key."""

from __future__ import annotations

import http.client
import json

import pytest
from patience import PATIENCE_S

pytestmark = pytest.mark.attack

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "GETT")
OPEN = {"/health", "/livez", "/ping"}
NOWHERE = (
    *("/", "//", "/v1", "/v1/", "/admin", "/.env", "/docs", "/redoc", "/metrics/", "/health/"),
    *("/v1/models/../../health", "/v1/models/%2e%2e/%2e%2e/etc/passwd", "/health%00", "/HEALTH"),
    *(
        "/health;/v1/models",
        "/health/../v1/models",
        "/./v1/models",
        "//v1/models",
        "/%76%31/models",
    ),
    *("/livez/../metrics", "/v1/models/" + "a" * 5000, "/v1/completions/", "/v1/chat", "/wp-login"),
    *("/metrics?x=/health", "/v1/models#/health", "/v1/models?" + "a=b&" * 2000, "/version/../.."),
    *("/openapi.json/..", "/v1/models/%ff%fe", "/v1/models/%", "/static/app.js", "/debug/pprof"),
)
KEYS = {
    "none": None,
    "empty": "Bearer ",
    "wrong": "Bearer attackers",
    "prefix": "Bearer attacke",
    "no scheme": "attacker",
    "basic": "Basic YXR0YWNrZXI6",
    "two": "Bearer attacker accomplice",
    "right": "Bearer attacker",
}


def test_no_route_answers_without_a_key_or_fails_with_one(attacked):
    found = json.loads(attacked.client.get("/openapi.json").text)["paths"]
    routes = [path.replace("{name}", "tiny") for path in found] + ["/ping"]
    assert set(routes) > OPEN and len(routes) > 8
    probes = 0
    connection = http.client.HTTPConnection("127.0.0.1", attacked.port, timeout=PATIENCE_S)
    for path in (*routes, *NOWHERE):
        for method in METHODS:
            # One with each key for a route, else one without and one with the right one.
            for name in KEYS if path in routes and method in ("GET", "POST") else ("none", "right"):
                headers = {} if KEYS[name] is None else {"Authorization": KEYS[name]}
                connection.request(method, path, body=b"", headers=headers)
                answer = connection.getresponse()
                body = answer.read()
                probes += 1
                what = method, path, name, answer.status, body[:200]
                if path in OPEN:
                    answered = ("GET", "HEAD", "POST") if path == "/ping" else ("GET", "HEAD")
                    assert answer.status == (200 if method in answered else 405), what
                elif name == "right":
                    refused = (403,) if path == "/reset_prefix_cache" else ()
                    assert answer.status in (200, 307, 400, 404, 405, *refused), what
                else:
                    assert answer.status == 401, what
    connection.close()
    assert probes > 900


def test_a_header_given_twice_is_no_way_in(attacked):
    connection = http.client.HTTPConnection("127.0.0.1", attacked.port, timeout=PATIENCE_S)
    for first, second in (("Bearer wrong", "Bearer"), ("", "Bearer wrong"), ("Bearer a", "b")):
        connection.putrequest("GET", "/v1/models")
        connection.putheader("Authorization", first)
        connection.putheader("Authorization", second)
        connection.endheaders()
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 401
    connection.close()
