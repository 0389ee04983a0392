"""The OpenAPI document against the server, by schemathesis: what it says is what comes."""

from __future__ import annotations

import pytest
from exhaustive import EXHAUSTIVE
from hypothesis import HealthCheck, given, settings
from patience import PATIENCE_S

schemathesis = pytest.importorskip("schemathesis")

from schemathesis import GenerationMode  # noqa: E402  (only where there is one)
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

pytestmark = pytest.mark.interfaces

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]
ROUTES, BODIES = 19, 10
EXAMPLES = 40 if EXHAUSTIVE else 8


@pytest.mark.parametrize("mode", GenerationMode)
def test_routes_keep_to_their_document(server, mode):
    """Whether what is sent keeps to it or not."""
    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= ROUTES
    if mode is GenerationMode.NEGATIVE:  # Without a body there is nothing to be wrong.
        operations = [operation for operation in operations if operation.body]
        assert len(operations) == BODIES
    answered = []
    for operation in operations:

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        def check(case):
            answered.append(case.call_and_validate(checks=CHECKS, timeout=PATIENCE_S).status_code)

        check()
    # Not everything that schemathesis makes up is wrong.
    assert (200 if mode is GenerationMode.POSITIVE else 400) in answered
