"""Time of decode attention to a shared prefix: every decode for itself, and once a group.

One layer with the heads of SmolLM2-135M (or --heads and --dim) and pages of 64 tokens; decodes
have 32 tokens of their own after the prefix. Both ways run in turns in one process; times are
medians, and the ratio is of those. `none` is a step of the same decodes without groups, for what
the section costs where it has nothing to do.

    python benchmarks/shared_prefix.py
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from table import print_table

from pallas_kernels.paged_attention import DecodeGroups, KVPages, RaggedBatch, paged_attention

PAGE = 64
OWN = 32
"""Tokens of each decode after the prefix."""


def step(rows: int, size: int, shared: int, heads: tuple[int, int], dim: int):
    """Inputs of `rows` decodes in groups of `size` with `shared` tokens in common."""
    rng = np.random.default_rng(0)
    groups, pages = rows // size, shared // PAGE
    own = -(-OWN // PAGE)
    num_pages = 1 + groups * pages + rows * own
    order = rng.permutation(np.arange(1, num_pages)).astype(np.int32)
    prefixes, rest = order[: groups * pages].reshape(groups, pages), order[groups * pages :]
    tables = np.concatenate([np.repeat(prefixes, size, 0), rest.reshape(rows, own)], axis=1)
    starts = np.arange(rows, dtype=np.int32)
    batch = RaggedBatch(tables, np.full(rows, shared + OWN, np.int32), starts, np.ones_like(starts))
    room = np.arange(rows // 2)
    of_group = [room * size, size, shared]
    present = DecodeGroups(
        *(np.where(room < groups, x, 0).astype(np.int32) for x in of_group)
    )._replace(starts=np.where(room < groups, room * size, rows).astype(np.int32))
    nothing = DecodeGroups(np.full_like(present.starts, rows), *np.zeros((2, len(room)), np.int32))
    kv = KVPages(
        rng.normal(size=(num_pages, heads[1], dim, PAGE)).astype(np.float32),
        rng.normal(size=(num_pages, heads[1], PAGE, dim)).astype(np.float32),
    )
    q = rng.normal(size=(rows, heads[0], dim)).astype(np.float32)
    return jax.tree.map(jnp.asarray, (q, kv, batch, present, nothing))


@functools.partial(jax.jit, static_argnames="dim")
def attend(q, pages, batch, groups, dim):
    return paged_attention(q, pages, batch, num_decodes=len(q), scale=dim**-0.5, groups=groups)[0]


def milliseconds(function, *arguments) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return (time.perf_counter() - begin) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 8, 32])
    parser.add_argument("--shared", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--heads", type=int, nargs=2, default=(9, 3))
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    lines = []
    for rows in options.rows:
        for size in sorted({2, 4, rows}):
            for shared in options.shared:
                q, pages, batch, groups, nothing = step(
                    rows, size, shared, tuple(options.heads), options.dim
                )
                ways = {"alone": None, "none": nothing, "groups": groups}
                times: dict[str, list[float]] = {name: [] for name in ways}
                for round_ in range(options.rounds + 1):
                    for name, given in ways.items():
                        taken = milliseconds(attend, q, pages, batch, given, options.dim)
                        if round_:  # The first compiles.
                            times[name].append(taken)
                alone, none, grouped = (statistics.median(times[name]) for name in ways)
                lines.append(
                    (
                        rows,
                        size,
                        shared,
                        f"{alone:.2f} ms",
                        f"{grouped:.2f} ms",
                        f"{alone / grouped:.2f}",
                        f"{none / alone:.2f}",
                    )
                )
    columns = ("decodes", "a group", "shared tokens", "alone", "in groups", "ratio", "none / alone")
    print_table("Decode attention of one layer", columns, lines)


if __name__ == "__main__":
    main()
