"""Pass-KV: keys and values are sent around the ring (Ring Attention, 2310.01889); queries stay.

    step      0     1     2     3          what a rank of four attends to, and n - 1 = 3 hops
    rank 0   k0    k3    k2    k1
    rank 1   k1    k0    k3    k2
    rank 2   k2    k1    k0    k3
    rank 3   k3    k2    k1    k0

At each step a rank sends its current keys and values on and attends to them. Send and attention do
not depend on each other, so the compiler overlaps them, and a step takes as long as the slower one.

One ring uses one direction of each link. Both ways, the even pages of every rank are sent up and
the odd ones down: messages are half as large, the number of hops is the same, and on a torus, with
a separate link to either neighbour, the sends take half the time. Behind a switch, where a device
sends everything through one port, it gains nothing. Every other page is a fair sample of a rank's
positions, so balanced work stays balanced to within a page per row.

XLA for GPUs keeps one send in flight, which is enough as long as it joins keys and values into one;
--xla_gpu_experimental_parallel_collective_overlap_limit=2 overlaps both with the kernel.

The steps are unrolled, so that a program has exactly ranks - 1 sends of each array and the compiler
sees them all. No send is conditional: a step in which a rank sees nothing has empty ranges, for
which kernels do no work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arrays import send
from pallas_kernels.merge import empty_partial, merge_two
from pallas_kernels.paged_attention import KVPages, Visible
from pallas_kernels.ring_attention.layout import round_robin
from pallas_kernels.ring_attention.work import Work


class _Traveller(NamedTuple):
    """Pages in flight: [rows * width pages, ...], the same number for each row.

    hop: ranks that they are sent up at each step. limits: maps limits of all keys of a rank to
    limits of the keys in these pages.
    """

    pages: KVPages
    hop: int
    limits: Callable[[jax.Array], jax.Array]


def pass_kv(
    q: jax.Array,
    pages: KVPages,
    work: Work,
    *,
    axis_name: str | tuple[str, ...],
    both_ways: bool,
    attend: Callable[..., tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array]:
    """Attention of q [rows * shard, heads, head_dim] to all ranks' pages.

    pages: this rank's keys and values, [rows * width, ...]: those of a row in order, row after row.
    attend: `paged_attention.attend` with its options given.
    Returns out and lse, both float32.
    """
    rows, ranks, rank = len(work.lengths), lax.axis_size(axis_name), lax.axis_index(axis_name)
    if both_ways:
        travellers = _even_up_odd_down(pages, rows)
    else:
        travellers = [_Traveller(pages, 1, lambda limit: limit)]
    out, lse = empty_partial(q, jnp.float32)
    for step in range(ranks):
        arriving = []
        if step < ranks - 1:
            arriving = [send(one.pages, one.hop, axis_name) for one in travellers]
        partials = []
        for one in travellers:
            tables = jnp.arange(len(one.pages.k), dtype=jnp.int32).reshape(rows, -1)
            batch, visible = work.between(rank, (rank - step * one.hop) % ranks, tables)
            visible = Visible(*map(one.limits, visible))
            partials.append(attend(q, one.pages, batch, visible))
        # Finish this step's receive and attention before the next send. Otherwise the compiler may
        # send everything first and hold all ranks' keys.
        (out, lse), partials, arrived = lax.optimization_barrier(((out, lse), partials, arriving))
        for partial in partials:
            out, lse = merge_two(out, lse, *partial)
        travellers = [one._replace(pages=pages) for one, pages in zip(travellers, arrived)]
    return out, lse


def _even_up_odd_down(pages: KVPages, rows: int) -> list[_Traveller]:
    """Even pages of each row, sent up, and odd pages, sent down."""
    page_size = pages.k.shape[3]
    halves = round_robin(page_size, 2)

    def half(parity, array):
        of_rows = array.reshape(rows, -1, *array.shape[1:])
        odd_width = of_rows.shape[1] % 2
        of_rows = jnp.pad(of_rows, [(0, 0), (0, odd_width), *[(0, 0)] * (array.ndim - 1)])
        return of_rows[:, parity::2].reshape(-1, *array.shape[1:])

    return [
        _Traveller(
            jax.tree.map(functools.partial(half, parity), pages),
            hop,
            functools.partial(halves.before, parity),
        )
        for parity, hop in ((0, 1), (1, -1))
    ]
