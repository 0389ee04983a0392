"""Whether to send keys and values or queries (Context Parallelism, 2411.01783, section 3.4).

T new tokens attend to themselves and P cached ones on N ranks, each of C FLOP/s and with a link of
W bytes/s. A rank has D / head_dim query heads and KV heads in the ratio h = KV heads / query heads,
of e bytes an element. In each of the N steps it computes for 4 T (T + P) D / (N^2 C) seconds, and
meanwhile

    pass-KV  sends 2 (T + P) / N * D h e bytes, hidden when           T     >= N C h e / (2 W)
    pass-Q   sends T / N * D e bytes, hidden when                     T + P >= N C e / (4 W),
             and last an all-to-all of N - 1 such messages, exposed, to bring the results home.

Where pass-KV is not hidden, it is still faster while the exposed part of its N - 1 messages is less
than that all-to-all: 2 h - 4 T W / (N C e) <= T / (T + P), both divided by N - 1 and
(T + P) / N * D e / W. Causal masks halve the compute of a full prefill, not of a short chunk after
a long context, where the choice is open.
"""

from __future__ import annotations

from typing import Literal


def choose_scheme(
    *,
    new_tokens: int,
    cached_tokens: int,
    ranks: int,
    query_heads: int,
    kv_heads: int,
    element_bytes: int,
    flops_per_s: float,
    link_bytes_per_s: float,
) -> Literal["pass_kv", "pass_q"]:
    """What to send, for a chunk of `new_tokens` after `cached_tokens` of one sequence.

    element_bytes: of queries and of keys. flops_per_s and link_bytes_per_s: of one rank, and only
    their ratio matters, so both may be those of one of the several devices of a rank.

    A full prefill is "pass_kv" wherever there are at least two query heads to a KV head; a decode
    step after a context that is not tiny is "pass_q".
    """
    kv_share = kv_heads / query_heads
    flops_per_link_byte = flops_per_s / link_bytes_per_s
    hides_kv = ranks * flops_per_link_byte * kv_share * element_bytes / 2
    if new_tokens >= hides_kv:
        return "pass_kv"
    hidden_share = 4 * new_tokens / (ranks * flops_per_link_byte * element_bytes)
    new_share = new_tokens / (new_tokens + cached_tokens)
    return "pass_kv" if new_share >= 2 * kv_share - hidden_share else "pass_q"
