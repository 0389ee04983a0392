"""Copies of KV pages between device memory and host memory."""

from __future__ import annotations

import jax
import numpy as np

from jaxserve.kv.transfers import MOVE_SIZES


class Staging:
    """Copies staging arrays to the host and back, from any thread, without compiling.

    On accelerators pages pass through pinned host memory, which the device accesses by DMA.
    """

    def __init__(self, image: jax.ShapeDtypeStruct) -> None:
        """`image`: shape and sharding of a staging array of one page."""
        self._place = image.sharding
        self._dtype = image.dtype
        self._pinned = None
        if next(iter(image.sharding.device_set)).platform != "cpu":
            self._pinned = image.sharding.with_memory_kind("pinned_host")

    def download(self, staging: jax.Array) -> np.ndarray:
        """Waits for a gather and returns its pages [rows, elements], read-only."""
        if self._pinned is not None:
            staging = jax.device_put(staging, self._pinned)
        return np.asarray(staging)

    def upload(self, images: np.ndarray) -> jax.Array:
        """A staging array of pages uint8 [rows, bytes], padded to the rows of a scatter program;
        waits until it is on the device."""
        size = next(size for size in MOVE_SIZES if size >= len(images))
        padded = np.zeros((size, images.shape[1]), np.uint8)
        padded[: len(images)] = images
        staging = padded.view(self._dtype)
        if self._pinned is not None:
            staging = jax.device_put(staging, self._pinned)
        return jax.block_until_ready(jax.device_put(staging, self._place))
