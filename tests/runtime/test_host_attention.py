"""Whether pages on the host come to the queries, or these go to them, by rates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxserve.runtime.hardware.host_cpu import HostRates, measure
from jaxserve.runtime.planning.host_attention import HostReads
from pallas_kernels.paged_attention import PageLayout

GB = 1e9
LLAMA_8B = HostReads(32, heads=32, head_dim=128, value_dim=128, itemsize=2, token_bytes=4096)
PCIE = HostRates(to_device=50 * GB, to_host=50 * GB, decode=150 * GB, chunk=600 * GB)


def test_bytes():
    """Keys and values of 8 heads, and queries, float32 results and log-sum-exps of 32."""
    assert LLAMA_8B.page_bytes(1000) == 32 * 1000 * 2 * 8 * 128 * 2
    assert LLAMA_8B.query_bytes(3) == 32 * 3 * 32 * (128 * 2 + 128 * 4 + 4)


@pytest.mark.parametrize(
    ("rates", "decodes", "chunk", "host_tokens", "queries"),
    [
        (PCIE, 1, 0, 60_000, True),  # The link is slower than the host's memory.
        (PCIE, 64, 0, 60_000, True),
        (PCIE, 0, 2048, 60_000, False),  # Its cores compute less than a device.
        (PCIE, 8, 2048, 60_000, False),
        (PCIE, 1, 0, 1, False),  # Queries are larger than a token's KV.
        (PCIE._replace(to_device=900 * GB), 1, 0, 60_000, False),
        (None, 1, 512, 60_000, True),  # The host is the device.
    ],
)
def test_the_faster_way_is_taken(rates, decodes, chunk, host_tokens, queries):
    assert LLAMA_8B.favour_queries(rates, decodes, chunk, host_tokens) == queries


def test_both_ways_take_the_same_time_where_the_rates_say_so():
    """Of one decode 4096 S / link = 24,704 / link + 4096 S / host."""
    even = 24_704 / 4096 / (1 - 50 / 150)
    assert not LLAMA_8B.favour_queries(PCIE, 1, 0, int(even))
    assert LLAMA_8B.favour_queries(PCIE, 1, 0, int(even) + 1)


def test_rates_are_measured():
    """Tokens of a chunk share each read, so that each of them attends to more."""
    pages = PageLayout(1, 16, 2, 8, jnp.dtype("float32"))
    rates = measure(jax.devices()[0], pages, 4, jnp.dtype("float32"))
    assert all(rate > 0 for rate in rates)
