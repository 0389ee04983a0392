"""Signatures and semantics of page copies.

A staged page holds everything that the pool has under one page id: layer by layer, keys
[kv_heads, head_dim, page_size] then values [kv_heads, page_size, head_dim], without gaps. Staging
[n, image_elements] is an array of staged pages that no step reads or writes: it is transferred
between device and host while the pool itself is donated from step to step.

Copies are bit-exact, whatever the dtype and whatever NaNs the pages hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import backends
from pallas_kernels.compat import GPU_KERNELS_WRITE_IN_PLACE
from pallas_kernels.page_copy import check_case, xla
from pallas_kernels.paged_attention import KVPages

_GPU, _TPU = "pallas_kernels.page_copy.mosaic_gpu", "pallas_kernels.page_copy.mosaic_tpu"
_GATHER, _SCATTER = (
    backends.Operation(path.__name__, path, kernels, check_case.shapes_class, check_case.check_case)
    for path, kernels in (
        (xla.gather_pages, {"gpu": _GPU, "tpu": _TPU}),
        (xla.scatter_pages, {"gpu": _GPU if GPU_KERNELS_WRITE_IN_PLACE else None, "tpu": _TPU}),
    )
)


def image_elements(layers: Sequence[KVPages]) -> int:
    """Elements of one staged page; `layers` may be arrays or only their shapes."""
    return sum(math.prod(array.shape[1:]) for pages in layers for array in pages)


def gather_pages(
    layers: Sequence[KVPages], page_ids: jax.Array, *, backend: backends.Backend = "auto"
) -> jax.Array:
    """Staging [n, image_elements], of the pages' dtype: row i is page page_ids[i].

    layers: the KVPages of each layer, all with the same number of pages and the same dtype.
    page_ids [n] int32, n at least 1; ids may repeat. An id outside the pool, negative ones
    included, gives zeros. backend: see `backends.Backend`; with "pallas", raises ValueError for
    what the kernel cannot copy. Raises ValueError, too, without layers or ids, and for layers that
    differ in dtype or number of pages.
    """
    _check(layers, page_ids)
    return _GATHER.run(backend, layers, page_ids)


def scatter_pages(
    layers: Sequence[KVPages],
    page_ids: jax.Array,
    staging: jax.Array,
    *,
    backend: backends.Backend = "auto",
) -> list[KVPages]:
    """The layers with row i of staging [n, image_elements] written to page page_ids[i], int32 [n].

    In place when the layers are donated. An id outside the pool, negative ones included, writes
    nothing. A repeated id ends with one of its rows, unspecified which: only the trash page should
    be repeated. Raises ValueError when staging has another shape or dtype than `gather_pages` of as
    many ids returns, and as `gather_pages` does.
    """
    _check(layers, page_ids)
    expected = (page_ids.shape[0], image_elements(layers))
    if staging.shape != expected:
        raise ValueError(
            f"staging has shape {staging.shape}; {expected[0]} page ids of {len(layers)} layers "
            f"need {expected}."
        )
    if staging.dtype != layers[0].k.dtype:
        raise ValueError(f"staging is {staging.dtype}; the pages are {layers[0].k.dtype}.")
    return _SCATTER.run(backend, layers, page_ids, staging)


def copy_pages(
    layers: Sequence[KVPages],
    sources: jax.Array,
    targets: jax.Array,
    *,
    backend: backends.Backend = "auto",
) -> list[KVPages]:
    """The layers with page sources[i] copied to page targets[i]; int32 [n] each.

    All sources are read before any target is written, so a page may be both. In place when the
    layers are donated, with n staged pages of temporary memory. A pair with an id outside the pool
    on either side, negative ones included, copies nothing. A repeated target ends as one of its
    sources, unspecified which: only the trash page should be repeated. Raises ValueError when the
    numbers of sources and targets differ, and as `gather_pages` does.
    """
    if sources.shape != targets.shape:
        raise ValueError(
            f"{sources.shape[0]} sources cannot be copied to {targets.shape[0]} targets: "
            "pad the shorter with -1."
        )
    _check(layers, sources)
    num_pages = layers[0].k.shape[0]
    targets = jnp.where((sources >= 0) & (sources < num_pages), targets, -1)
    images = gather_pages(layers, sources, backend=backend)
    return scatter_pages(layers, targets, images, backend=backend)


def _check(layers, page_ids):
    arrays = [array for pages in layers for array in pages]
    kinds = {(array.dtype.name, array.shape[0]) for array in arrays}
    if len(kinds) != 1:
        raise ValueError(
            f"layers hold pages of {sorted(kinds)} (dtype, number of pages); all must have as many "
            "of the same dtype, and there must be one layer at least."
        )
    if page_ids.ndim != 1 or not page_ids.shape[0]:
        raise ValueError(f"page ids have shape {page_ids.shape}; there must be one at least.")
