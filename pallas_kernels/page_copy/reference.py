"""Reference page copies in numpy and plain loops. Returns new arrays, changes none."""

from __future__ import annotations

import numpy as np

from pallas_kernels.paged_attention import KVPages


def gather_pages(layers, page_ids):
    """Same arguments and results as `api.gather_pages`, as numpy arrays."""
    num_pages = len(layers[0].k)
    images = []
    for page in page_ids:
        image = np.concatenate([array[page % num_pages].ravel() for kv in layers for array in kv])
        images.append(image if 0 <= page < num_pages else np.zeros_like(image))
    return np.stack(images)


def scatter_pages(layers, page_ids, staging):
    """Same as `api.scatter_pages`; the last row of a repeated page id wins."""
    layers = [KVPages(*(array.copy() for array in kv)) for kv in layers]
    for page, image in zip(page_ids, staging):
        if not 0 <= page < len(layers[0].k):
            continue
        for kv in layers:
            for array in kv:
                array[page] = image[: array[page].size].reshape(array[page].shape)
                image = image[array[page].size :]
    return layers


def copy_pages(layers, sources, targets):
    """Same as `api.copy_pages`; the last source of a repeated target wins."""
    copied = [KVPages(*(array.copy() for array in kv)) for kv in layers]
    num_pages = len(layers[0].k)
    for source, target in zip(sources, targets):
        if not (0 <= source < num_pages and 0 <= target < num_pages):
            continue
        for kv, new in zip(layers, copied):
            new.k[target], new.v[target] = kv.k[source], kv.v[source]
    return copied
