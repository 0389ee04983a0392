"""Sizes that a kernel could take, each timed at the same problems: the table of `tuned.json`."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from device import measure
from device.attention import Attention
from device.problem import Problem
from pallas_kernels.paged_attention import Visible

KERNEL, SIZE = "paged_decode", "split_tokens"
VALUES = (128, 256, 512, 1024)
K = 1024
CASES = {
    "1 x 1k": Attention((K,)),
    "1 x 8k": Attention((8 * K,)),
    "1 x 68k": Attention((68 * K,)),
    "8 x 33k": Attention((33 * K,) * 8),
    "64 x 8k": Attention((8 * K,) * 64),
}


def problem(spec: Attention, split_tokens: int) -> Problem:
    """Decodes cut into such splits."""
    import jax.numpy as jnp

    from pallas_kernels.paged_attention.gpu.decode import paged_decode

    def kernel(carry, inputs):
        q, pages, batch = inputs
        visible = Visible(jnp.zeros_like(batch.context), batch.context)
        rows = len(spec.decodes)
        return carry, paged_decode(
            q, pages, batch, visible, num_decodes=rows, scale=spec.scale, split_tokens=split_tokens
        )

    return dataclasses.replace(spec.problem(), kernel=kernel, xla=None)


def tasks(seed: int) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """A key, and what measures it, for every value at every case."""

    def measured(name, value):
        found = measure.measured(problem(CASES[name], value), seed)
        return {"kernel": KERNEL, "size": SIZE, "value": value, "case": name, **found}

    for name in CASES:
        for value in VALUES:
            yield f"{KERNEL}, {SIZE} {value}: {name}", functools.partial(measured, name, value)


def tuned(
    known: Mapping[str, Any], device_kind: str, records: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """`tuned.json` as it is, with the quickest value of those that were right at every case: that
    of the least geometric mean of times."""
    times: dict[int, dict[str, float]] = {}
    for record in records:
        if record["part"] == "sweep" and record["status"] == "done" and "us" in record:
            times.setdefault(record["value"], {})[record["case"]] = record["us"]
    whole = {value: us for value, us in times.items() if us.keys() == CASES.keys()}
    merged = json.loads(json.dumps(known))
    if whole:
        best = min(whole, key=lambda value: sum(map(math.log, whole[value].values())))
        merged.setdefault(device_kind, {}).setdefault(KERNEL, {})[SIZE] = best
    return merged
