"""Pages of all layers moved between the pool and staging, or within it, at real shapes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

from device import errors
from device.problem import Make, Problem
from pallas_kernels.page_copy import copy_pages, gather_pages, scatter_pages
from pallas_kernels.paged_attention import KVPages, PageLayout


@dataclasses.dataclass(frozen=True)
class PageMove:
    """`moved` random pages of a pool of `num_pages`; the default shapes are Llama 3 8B's."""

    direction: Literal["gather", "scatter", "copy"]
    moved: int
    num_pages: int = 257
    layers: int = 32
    page_size: int = 64
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"

    @property
    def op(self) -> str:
        return "page_copy"

    @property
    def layout(self) -> PageLayout:
        dtype = jnp.dtype(self.dtype)
        return PageLayout(self.num_pages, self.page_size, self.kv_heads, self.head_dim, dtype)

    @property
    def whole_page_bytes(self) -> int:
        return self.layers * self.layout.page_bytes

    def carry(self, make: Make) -> list[KVPages]:
        """The pool."""
        shapes = self.layout.shapes
        return [
            jax.tree.map(lambda s: make.random(*s.shape, dtype=s.dtype), shapes)
            for _ in range(self.layers)
        ]

    def inputs(self, make: Make):
        """Page ids, for a scatter the rows, and for a copy the ids of targets."""
        order = 1 + make.rng.permutation(self.num_pages - 1)
        ids = make.known(order[: self.moved])
        if self.direction == "copy":
            return ids, make.known(order[-self.moved :])
        if self.direction == "gather":
            return (ids,)
        elements = self.whole_page_bytes // jnp.dtype(self.dtype).itemsize
        return ids, make.random(self.moved, elements, dtype=self.dtype)

    def problem(self) -> Problem:
        step = {"gather": _gather, "scatter": _scatter, "copy": _copy}[self.direction]
        by_xla = functools.partial(step, "xla")  # which rounds nothing
        return Problem(
            carry=self.carry,
            inputs=self.inputs,
            kernel=functools.partial(step, "pallas"),
            xla=by_xla,
            exact=by_xla,
            error=errors.differing,
            bytes_moved=2 * self.moved * self.whole_page_bytes,
        )


def possible(spec: object) -> bool:
    """Whether this JAX can do a case: before 0.11 kernels cannot write in place."""
    scatters = isinstance(spec, PageMove) and spec.direction != "gather"
    return not scatters or jax.__version_info__ >= (0, 11)


def _gather(backend, layers, inputs):
    return layers, gather_pages(layers, *inputs, backend=backend)


def _copy(backend, layers, inputs):
    return copy_pages(layers, *inputs, backend=backend), ()


def _scatter(backend, layers, inputs):
    return scatter_pages(layers, *inputs, backend=backend), ()
