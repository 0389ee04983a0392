"""Signatures and semantics of page copies.

A staged page holds everything that the pool has under one page id: layer by layer, keys
[kv_heads, head_dim, page_size], values [kv_heads, page_size, head_dim], then scales if there are
any, [kv_heads, 2, page_size], without gaps. Staging [n, row_elements] is an array of staged
pages that no step reads or writes: it is transferred between device and host while the pool itself
is donated from step to step. It has the dtype of the pages; with scales, its elements are bytes.

Copies are bit-exact, whatever the dtype and whatever NaNs the pages hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import backends
from pallas_kernels.compat import GPU_KERNELS_WRITE_IN_PLACE
from pallas_kernels.page_copy import check_case, xla
from pallas_kernels.page_copy.rows import row_dtype, row_elements
from pallas_kernels.paged_attention import Pages

_GPU, _TPU = "pallas_kernels.page_copy.mosaic_gpu", "pallas_kernels.page_copy.mosaic_tpu"
_GATHER, _SCATTER = (
    backends.Operation(path.__name__, path, kernels, check_case.shapes_class, check_case.check_case)
    for path, kernels in (
        (xla.gather_pages, {"gpu": _GPU, "tpu": _TPU}),
        (xla.scatter_pages, {"gpu": _GPU if GPU_KERNELS_WRITE_IN_PLACE else None, "tpu": _TPU}),
    )
)


def gather_pages(
    layers: Sequence[Pages], page_ids: jax.Array, *, backend: backends.Backend = "auto"
) -> jax.Array:
    """Staging [n, row_elements]: row i is page page_ids[i].

    layers: the pages of each layer, all with the same number of pages and the same dtype.
    page_ids [n] int32, n at least 1; ids may repeat. An id outside the pool, negative ones
    included, gives zeros. backend: see `backends.Backend`; with "pallas", raises ValueError for
    what the kernel cannot copy. Raises ValueError, too, without layers or ids, and for layers that
    differ in dtype or number of pages.
    """
    _check(layers, page_ids)
    return _GATHER.run(backend, layers, page_ids)


def scatter_pages(
    layers: Sequence[Pages],
    page_ids: jax.Array,
    staging: jax.Array,
    *,
    backend: backends.Backend = "auto",
) -> list[Pages]:
    """The layers with row i of staging [n, row_elements] written to page page_ids[i], int32 [n].

    In place when the layers are donated. An id outside the pool, negative ones included, writes
    nothing. A repeated id ends with one of its rows, unspecified which: only the trash page should
    be repeated. Raises ValueError when staging has another shape or dtype than `gather_pages` of as
    many ids returns, and as `gather_pages` does.
    """
    _check(layers, page_ids)
    expected = (page_ids.shape[0], row_elements(layers))
    if staging.shape != expected:
        raise ValueError(
            f"staging has shape {staging.shape}; {expected[0]} page ids of {len(layers)} layers "
            f"need {expected}."
        )
    if staging.dtype != row_dtype(layers):
        raise ValueError(f"staging is {staging.dtype}; it must be {row_dtype(layers)}.")
    return _SCATTER.run(backend, layers, page_ids, staging)


def copy_pages(
    layers: Sequence[Pages],
    sources: jax.Array,
    targets: jax.Array,
    *,
    backend: backends.Backend = "auto",
) -> list[Pages]:
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
    rows = gather_pages(layers, sources, backend=backend)
    return scatter_pages(layers, targets, rows, backend=backend)


def _check(layers, page_ids):
    arrays = jax.tree.leaves([pages.elements for pages in layers])
    kinds = {(array.dtype.name, array.shape[0]) for array in arrays}
    if len(kinds) != 1:
        raise ValueError(
            f"layers hold pages of {sorted(kinds)} (dtype, number of pages); all must have as many "
            "of the same dtype, and there must be one layer at least."
        )
    if page_ids.ndim != 1 or not page_ids.shape[0]:
        raise ValueError(f"page ids have shape {page_ids.shape}; there must be one at least.")
