"""Conversion between page bytes and the KV of tokens.

The layout of page bytes depends on the engine: the parts of all its devices in turn (by stage, then
by share of the page's tokens, then by heads), each with all layers of the stage, keys `[heads,
head_dim, tokens]` before values `[heads, tokens, head_dim]`. Heads may be replicated, or padding.
The KV of a token, `[layers, 2, kv_heads, head_dim]`, keys before values, is the same for engines of
any page size and any mesh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxserve.core.errors import SnapshotError
from jaxserve.core.model_config import ModelConfig
from jaxserve.kv.tiers import Store, Tier
from jaxserve.runtime.programs.program_shapes import ProgramShapes
from jaxserve.runtime.runner import Runner
from sharding_rules import HeadLayout


class ImageLayout:
    """Location of each token's KV in the bytes of a page."""

    def __init__(self, shapes: ProgramShapes, model: ModelConfig) -> None:
        """`model` is the config of the checkpoint, not the partitioned one of `shapes`."""
        self.dtype = np.dtype(shapes.dtype)
        self.page_tokens = shapes.config.page_size
        self.token_shape = (model.num_layers, 2, model.num_kv_heads, model.head_dim)
        self._mesh = (shapes.stages, shapes.seq, shapes.tensor)
        self._local = (shapes.local_model.num_layers, 2, shapes.local_model.num_kv_heads)
        self._head_dim = model.head_dim
        # [heads of the mesh] Index of the model's head, -1 for padding.
        self._heads = HeadLayout(model.num_heads, model.num_kv_heads, shapes.tensor).keys()

    def tokens(self, images: np.ndarray) -> np.ndarray:
        """KV [pages, page_tokens, layers, 2, kv_heads, head_dim] of page bytes [pages, bytes]."""
        count, dim, share = len(images), self._head_dim, self.page_tokens // self._mesh[1]
        parts = images.view(self.dtype).reshape(count, *self._mesh, *self._local, -1)
        k = parts[..., 0, :, :].reshape(*parts.shape[:5], -1, dim, share).swapaxes(-1, -2)
        v = parts[..., 1, :, :].reshape(*parts.shape[:5], -1, share, dim)
        # [pages, stage, seq, tensor, layer, 2, head, token, head_dim], to tokens first.
        both = np.stack([k, v], axis=5).transpose(0, 2, 7, 1, 4, 5, 3, 6, 8)
        whole = both.reshape(count, self.page_tokens, *self.token_shape[:2], -1, dim)
        _, first = np.unique(self._heads, return_index=True)
        return whole[..., first[-self.token_shape[2] :], :]

    def images(self, tokens: np.ndarray) -> np.ndarray:
        """Page bytes uint8 [pages, bytes] of KV in the shape that `tokens` returns."""
        (stages, shares, ranks), (layers, _, heads) = self._mesh, self._local
        there = (self._heads >= 0)[:, None]
        whole = np.where(there, tokens[..., self._heads, :], np.zeros((), self.dtype))
        both = whole.reshape(
            len(tokens), shares, -1, stages, layers, 2, ranks, heads, self._head_dim
        ).transpose(0, 3, 1, 6, 4, 5, 7, 2, 8)
        k, v = both[..., 0, :, :, :].swapaxes(-1, -2), both[..., 1, :, :, :]
        flat = [np.ascontiguousarray(part).reshape(*both.shape[:5], -1) for part in (k, v)]
        return np.concatenate(flat, axis=-1).reshape(len(tokens), -1).view(np.uint8)


class PageImages:
    """Reads an engine's pages on any tier, and writes those of the device, as KV of tokens."""

    def __init__(self, layout: ImageLayout, runner: Runner, stores: Mapping[Tier, Store]) -> None:
        self.layout = layout
        self.page_tokens = layout.page_tokens
        self.page_bytes = self.page_tokens * math.prod(layout.token_shape) * layout.dtype.itemsize
        self._runner = runner
        self._stores = stores

    def read(self, tier: Tier, pages: Sequence[int]) -> np.ndarray:
        """KV of up to MOVE_PAGES pages, as `ImageLayout.tokens` returns it.

        Raises PageCorruptError or OSError where a lower tier cannot be read.
        """
        on_device = tier is Tier.DEVICE
        images = self._runner.read_pages(pages) if on_device else self._stores[tier].read(pages)
        return self.layout.tokens(images)

    def write(self, pages: Sequence[int], tokens: np.ndarray) -> None:
        """Writes KV of whole pages to up to MOVE_PAGES pages of the device.

        Raises SnapshotError for KV of another shape or dtype.
        """
        layout = self.layout
        if tokens.shape[2:] != layout.token_shape or tokens.dtype != layout.dtype:
            raise SnapshotError(
                f"a token's KV is {tokens.dtype} {list(tokens.shape[2:])} in the snapshot, and "
                f"{layout.dtype} {list(layout.token_shape)} in this engine."
            )
        self._runner.write_pages(pages, self.layout.images(tokens))
