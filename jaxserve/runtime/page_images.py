"""Conversion between page bytes and the KV of tokens.

The layout of page bytes depends on the engine: the parts of all its devices in turn (by stage, then
by share of the page's tokens, then by heads), each with all layers of the stage: keys `[heads,
head_dim, tokens]`, values `[heads, tokens, head_dim]` and, of quantized pages, scales `[heads, 2,
tokens]`. Heads may be replicated, or padding. The KV of a token, `[layers, 2, kv_heads, head_dim]`,
keys before values, is the same for engines of any page size and any mesh. Quantized, it is bytes,
and each head's elements are followed by their scale. Latents are keys without values, so there the
2 is a 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxserve.core.errors import SnapshotError
from jaxserve.core.model_config import ModelConfig
from jaxserve.kv.offload.tiers import Store, Tier
from jaxserve.runtime.programs.shapes.program import ProgramShapes
from jaxserve.runtime.runner import Runner
from sharding_rules import HeadLayout


class ImageLayout:
    """Location of each token's KV in the bytes of a page."""

    def __init__(self, shapes: ProgramShapes, model: ModelConfig) -> None:
        """`model` is the config of the checkpoint, not the partitioned one of `shapes`."""
        pages = shapes.kv.pages
        self.dtype = np.dtype(np.uint8 if pages.scaled else pages.dtype)
        self.page_tokens = shapes.config.page_size
        self._scale_bytes = np.dtype(np.float32).itemsize if pages.scaled else 0
        width = model.head_dim + self._scale_bytes
        self.token_shape = (model.num_layers, 1 if model.mla else 2, model.num_kv_heads, width)
        self._mesh = (shapes.stages, shapes.seq, shapes.tensor)
        self._local = (shapes.local_model.num_layers, shapes.local_model.num_kv_heads)
        self._head_dim = model.head_dim
        # [heads of the mesh] Index of the model's head, -1 for padding.
        self._heads = HeadLayout(model.num_heads, model.num_kv_heads, shapes.tensor).keys()

    def tokens(self, images: np.ndarray) -> np.ndarray:
        """KV [pages, page_tokens, *token_shape] of page bytes [pages, bytes]."""
        count, dim, share = len(images), self._head_dim, self.page_tokens // self._mesh[1]
        (layers, heads), sides = self._local, self.token_shape[1]
        size = heads * share * dim
        of_layer = sides * (size + heads * share * self._scale_bytes)
        # A draft model's layers, if a page has them, come last.
        parts = images.view(self.dtype).reshape(count, math.prod(self._mesh), -1)
        parts = parts[..., : layers * of_layer].reshape(count, *self._mesh, layers, of_layer)
        k, *v, scales = np.split(parts, [size * side for side in range(1, sides + 1)], axis=-1)
        k = k.reshape(*parts.shape[:5], heads, dim, share).swapaxes(-1, -2)
        v = [values.reshape(*parts.shape[:5], heads, share, dim) for values in v]
        scales = scales.reshape(*parts.shape[:5], heads, sides, share, self._scale_bytes)
        # [pages, stage, seq, tensor, layer, 2, head, token, head_dim], to tokens first.
        both = np.concatenate([np.stack([k, *v], axis=5), scales.swapaxes(5, 6)], axis=-1)
        whole = both.transpose(0, 2, 7, 1, 4, 5, 3, 6, 8).reshape(
            count, self.page_tokens, *self.token_shape[:2], -1, self.token_shape[3]
        )
        _, first = np.unique(self._heads, return_index=True)
        return whole[..., first[-self.token_shape[2] :], :]

    def images(self, tokens: np.ndarray) -> np.ndarray:
        """Page bytes uint8 [pages, bytes] of KV in the shape that `tokens` returns."""
        (stages, shares, ranks), (layers, heads), dim = self._mesh, self._local, self._head_dim
        there, sides = (self._heads >= 0)[:, None], self.token_shape[1]
        whole = np.where(there, tokens[..., self._heads, :], np.zeros((), self.dtype))
        both = whole.reshape(
            len(tokens), shares, -1, stages, layers, sides, ranks, heads, self.token_shape[3]
        ).transpose(0, 3, 1, 6, 4, 5, 7, 2, 8)
        k, v = both[..., 0, :, :, :dim].swapaxes(-1, -2), both[..., 1:, :, :, :dim]
        scales = both[..., dim:].swapaxes(5, 6)
        flat = [np.ascontiguousarray(part).reshape(*both.shape[:5], -1) for part in (k, v, scales)]
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
