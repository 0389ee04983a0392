"""Images of KV pages between the devices' memory and the host's."""

from __future__ import annotations

import jax
import numpy as np

from jaxserve.kv.transfers import MOVE_SIZES


class Staging:
    """Takes staging arrays to the host and back; for any thread, and for none of them compiles.

    On accelerators images pass through pinned host memory, from which the device copies by itself.
    """

    def __init__(self, image: jax.ShapeDtypeStruct) -> None:
        """`image`: shape of a staging array of one image, and where it lies."""
        self._place = image.sharding
        self._dtype = image.dtype
        self._pinned = None
        if next(iter(image.sharding.device_set)).platform != "cpu":
            self._pinned = image.sharding.with_memory_kind("pinned_host")

    def download(self, staging: jax.Array) -> np.ndarray:
        """The images [rows, elements] of a gather, when it is done; not to be written to."""
        if self._pinned is not None:
            staging = jax.device_put(staging, self._pinned)
        return np.asarray(staging)

    def upload(self, images: np.ndarray) -> jax.Array:
        """A staging array of images uint8 [rows, bytes], with rows for the program that scatters
        them; waits until it is there."""
        size = next(size for size in MOVE_SIZES if size >= len(images))
        padded = np.zeros((size, images.shape[1]), np.uint8)
        padded[: len(images)] = images
        staging = padded.view(self._dtype)
        if self._pinned is not None:
            staging = jax.device_put(staging, self._pinned)
        return jax.block_until_ready(jax.device_put(staging, self._place))
