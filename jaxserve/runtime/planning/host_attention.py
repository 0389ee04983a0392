"""Whether the KV on the host goes to the queries, or the queries go to it.

Attention to pages on the host is computed on the device, to which the pages are copied, or on the
host, to which the queries are copied, and from which the results come back (FlexGen, 2303.06865;
InstInfer, 2409.04992).
"""

from __future__ import annotations

import dataclasses

from jaxserve.runtime.hardware.host_attention import HostRates


@dataclasses.dataclass(frozen=True)
class HostReads:
    """What steps copy to attend to pages on the host. Of `num_layers` layers, each with `heads`
    query heads of `head_dim` features of `itemsize` bytes, and `token_bytes` of KV of a token."""

    num_layers: int
    heads: int
    head_dim: int
    itemsize: int
    token_bytes: int

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
        return self.num_layers * tokens * self.heads * (self.head_dim + 1) * 4

    def favour_queries(
        self, rates: HostRates | None, decodes: int, chunk: int, host_tokens: int
    ) -> bool:
        """Whether a step of some decodes and a chunk of prefill tokens, each after as many tokens
        on the host, takes less time if queries go to the host. The device's own attention takes
        none: it is faster than any link. Without `rates` the host is the device, which need
        not copy any."""
        if rates is None:
            return True
        tokens, rows = decodes + chunk, decodes + (chunk > 0)
        pages_s = self.page_bytes(rows * host_tokens) / rates.to_device
        copies_s = self._queries(tokens) / rates.to_host + self._results(tokens) / rates.to_device
        attention_s = self.page_bytes(host_tokens) * (decodes / rates.decode + chunk / rates.chunk)
        return copies_s + attention_s < pages_s
