"""Whether the KV on the host goes to the queries, or the queries go to it.

Attention to pages on the host is computed on the device, to which the pages are copied, or on the
host, to which the queries are copied, and from which the results come back (FlexGen, 2303.06865;
InstInfer, 2409.04992).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxserve.runtime.hardware.host_cpu import HostRates


class HostSeconds(NamedTuple):
    """Time of a step's attention to pages on the host: of copies to the device and to the host, and
    of what the host computes."""

    to_device: float
    to_host: float
    attention: float


@dataclasses.dataclass(frozen=True)
class HostReads:
    """What steps copy to attend to pages on the host. Of `num_layers` layers, each with `heads`
    query heads of `head_dim` features of `itemsize` bytes, whose results have `value_dim`, and
    `token_bytes` of KV of a token; each of as many devices as `links` copies its own heads' part.
    """

    num_layers: int
    heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    token_bytes: int
    links: int = 1

    def page_bytes(self, tokens: int) -> int:
        """Keys and values of so many tokens on the host."""
        return self.num_layers * tokens * self.token_bytes

    def query_bytes(self, tokens: int) -> int:
        """Queries of so many tokens of a step, and the results with their log-sum-exps, whatever
        the number of tokens on the host."""
        return self._queries(tokens) + self._results(tokens)

    def _queries(self, tokens: int) -> int:
        return self.num_layers * tokens * self.heads * self.head_dim * self.itemsize

    def _results(self, tokens: int) -> int:
        return self.num_layers * tokens * self.heads * (self.value_dim + 1) * 4

    def seconds(
        self, rates: HostRates, by_queries: bool, decodes: int, chunk: int, host_tokens: int
    ) -> HostSeconds:
        """Of a step of some decodes and a chunk of prefill tokens, each after as many tokens on the
        host. The device's own attention takes none: it is faster than any link."""
        to_device, to_host = self.links * rates.to_device, self.links * rates.to_host
        if not by_queries:
            rows = decodes + (chunk > 0)
            return HostSeconds(self.page_bytes(rows * host_tokens) / to_device, 0.0, 0.0)
        tokens = decodes + chunk
        return HostSeconds(
            self._results(tokens) / to_device,
            self._queries(tokens) / to_host,
            self.page_bytes(host_tokens) * (decodes / rates.decode + chunk / rates.chunk),
        )

    def favour_queries(
        self, rates: HostRates | None, decodes: int, chunk: int, host_tokens: int
    ) -> bool:
        """Whether such a step takes less time if queries go to the host. Without `rates` the host
        is the device, which need not copy any."""
        if rates is None:
            return True
        queries, pages = (
            sum(self.seconds(rates, by_queries, decodes, chunk, host_tokens))
            for by_queries in (True, False)
        )
        return queries < pages


@dataclasses.dataclass(frozen=True)
class HostAttention:
    """The way that steps of each size go, for a context of half of `max_model_len`, and the time
    that they take so."""

    reads: HostReads
    rates: HostRates | None
    max_model_len: int

    def sends_queries(self, decodes: int, chunk: int) -> bool:
        """Whether steps of so many decodes and prefill tokens send queries."""
        return self.reads.favour_queries(self.rates, decodes, chunk, self.max_model_len // 2)

    def seconds(self, decodes: int, chunk: int, host_tokens: int) -> HostSeconds:
        """Of such a step, each of whose decodes and prefill tokens comes after as many tokens on
        the host. Needs `rates`."""
        by_queries = self.sends_queries(decodes, chunk)
        return self.reads.seconds(self.rates, by_queries, decodes, chunk, host_tokens)
