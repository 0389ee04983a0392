"""Pass-Q: queries are sent around the ring, results back home (TokenRing, 2412.20501); keys stay.

    step      0     1     2     3          whose queries a rank of four has
    rank 0   q0    q3    q2    q1
    rank 1   q1    q0    q3    q2          after step s, results go back s ranks in one send:
    rank 2   q2    q1    q0    q3          rank 2 sends its result of q0, step 2, straight to rank 0
    rank 3   q3    q2    q1    q0

Queries are sent up and results down, so both directions of the links are used, and the results of
one step are sent while the next one computes: there is no all-to-all at the end, as in the pass-Q
of 2411.01783. There are ranks - 1 sends each of queries, outs and log-sum-exps. XLA for GPUs keeps
one send in flight, which exposes one of the two unless the compiler option
xla_gpu_experimental_parallel_collective_overlap_limit is 2.

Load of a link at each step, in units of a rank's queries, with h KV heads per query head and P keys
on a rank for each of its queries (1 in a full prefill):

    scheme               up         down
    pass-KV              2 h P      -
    pass-KV both ways    h P        h P
    TokenRing            1          1 and the log-sum-exps, s ranks far at step s

So in a full prefill TokenRing equals pass-KV both ways without grouped heads, and is slower with
them. It wins for chunks after a long context, whose keys would be a large message. A send over s
ranks is one hop through a switch, and min(s, ranks - s) on a torus.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arrays import send
from pallas_kernels.merge import empty_partial, merge_two
from pallas_kernels.paged_attention import KVPages
from pallas_kernels.ring_attention.work import Work


def token_ring(
    q: jax.Array,
    pages: KVPages,
    tables: jax.Array,
    work: Work,
    *,
    axis_name: str | tuple[str, ...],
    attend: Callable[..., tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array]:
    """Attention of q [rows * shard, heads, head_dim] to all ranks' pages.

    tables [rows, pages] int32: page table of each row in this rank's pool, `pages`.
    attend: `paged_attention.attend` with its options given.
    Returns out and lse, both float32.
    """
    ranks, rank = lax.axis_size(axis_name), lax.axis_index(axis_name)
    out, lse = empty_partial(q, jnp.float32)
    dtype = q.dtype
    for step in range(ranks):
        arriving = send(q, 1, axis_name) if step < ranks - 1 else None
        partial = attend(q, pages, *work.between((rank - step) % ranks, rank, tables))
        # Results sent home in the last step have arrived by the end of this one.
        (out, lse), partial, q = lax.optimization_barrier(((out, lse), partial, arriving))
        if step:
            # A result is as large as its queries only in their dtype.
            partial = send((partial[0].astype(dtype), partial[1]), -step, axis_name)
        out, lse = merge_two(out, lse, *partial)
    return out, lse
