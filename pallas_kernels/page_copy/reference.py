"""Reference page copies in numpy and plain loops. Returns new arrays, changes none."""

from __future__ import annotations

import jax
import numpy as np


def gather_pages(layers, page_ids):
    """Same arguments and results as `api.gather_pages`, as numpy arrays."""
    arrays, num_pages = jax.tree.leaves(layers), len(layers[0].k)
    dtypes = {array.dtype for array in arrays}
    dtype = dtypes.pop() if len(dtypes) == 1 else np.uint8
    rows = []
    for page in page_ids:
        row = np.concatenate([array[page % num_pages].ravel().view(dtype) for array in arrays])
        rows.append(row if 0 <= page < num_pages else np.zeros_like(row))
    return np.stack(rows)


def scatter_pages(layers, page_ids, staging):
    """Same as `api.scatter_pages`; the last row of a repeated page id wins."""
    layers = jax.tree.map(np.copy, layers)
    for page, row in zip(page_ids, staging):
        if not 0 <= page < len(layers[0].k):
            continue
        for array in jax.tree.leaves(layers):
            size = array[page].nbytes // row.itemsize
            array[page] = row[:size].view(array.dtype).reshape(array[page].shape)
            row = row[size:]
    return layers


def copy_pages(layers, sources, targets):
    """Same as `api.copy_pages`; the last source of a repeated target wins."""
    copied = jax.tree.map(np.copy, layers)
    num_pages = len(layers[0].k)
    for source, target in zip(sources, targets):
        if not (0 <= source < num_pages and 0 <= target < num_pages):
            continue
        for old, new in zip(jax.tree.leaves(layers), jax.tree.leaves(copied)):
            new[target] = old[source]
    return copied
