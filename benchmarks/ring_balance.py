"""How evenly causal attention is divided among ranks, by how tokens are assigned to them.

Counts query-key pairs from the ranges that ring attention gives its kernels. A ring waits for its
slowest rank at every step, so its time follows the sum over steps of the maximum that any rank
computes. Contiguous shares come to 2 - 1 / ranks of the mean for long sequences.
"""

from __future__ import annotations

import argparse

import numpy as np
from table import print_table

from pallas_kernels.ring_attention import Work, contiguous, pairs, round_robin, zigzag

PAGE_SIZE = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens-per-rank", type=int, nargs="+", default=[16, 16_384])
    shares = parser.parse_args().tokens_per_rank
    rows = []
    for share in shares:
        for ranks in (2, 4, 8, 16):
            lengths = np.array([share * ranks])
            layouts = contiguous(lengths, ranks), zigzag(lengths, ranks)
            if share > PAGE_SIZE:
                layouts += (round_robin(PAGE_SIZE, ranks),)
            of_step = [
                pairs(Work(layout, layout, lengths, lengths, share, True, None))
                for layout in layouts
            ]
            mean = of_step[0].sum() / ranks
            most_of_a_rank = [float(steps.sum(0).max() / mean) for steps in of_step]
            ring = [float(steps.max(1).sum() / mean) for steps in of_step]
            missing = [None] * (3 - len(layouts))
            rows.append((share, ranks, *most_of_a_rank, *missing, *ring, *missing))
    names = "contiguous", "zigzag", f"pages of {PAGE_SIZE} in turn"
    columns = (*(f"{name}, max" for name in names), *(f"{name}, ring" for name in names))
    print_table(
        "Pairs of query and key, over the mean of a rank: the most of any rank, and a ring's steps",
        ("tokens a rank", "ranks", *columns),
        rows,
    )


if __name__ == "__main__":
    main()
