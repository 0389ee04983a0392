"""KV of tokens as the model has it, and as it lies on pages: the one to the other and back.

An image is the bytes of a page as one engine lays them out: the parts of all its devices in turn
(those of a stage, then of its share of a page's tokens, then of its heads), in each all layers of
the stage, keys `[heads, head_dim, tokens]` before values `[heads, tokens, head_dim]`. Heads may
come in copies, or be padding. None of that is left in the KV of a token, `[layers, 2, kv_heads,
head_dim]`, keys before values: it is the same for engines of any page size and any mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxserve.kv.tiers import Store, Tier
from jaxserve.models.config import ModelConfig
from jaxserve.runtime.geometry import Geometry
from jaxserve.runtime.runner import Runner
from sharding_rules import HeadLayout


class ImageLayout:
    """Where the KV of each token is in an image."""

    def __init__(self, geometry: Geometry, model: ModelConfig) -> None:
        """`model` as it is in its files, and not as `geometry` has it partitioned."""
        self.dtype = np.dtype(geometry.dtype)
        self.page_tokens = geometry.config.page_size
        self.token_shape = (model.num_layers, 2, model.num_kv_heads, model.head_dim)
        self._mesh = (geometry.stages, geometry.seq, geometry.tensor)
        self._local = (geometry.local_model.num_layers, 2, geometry.local_model.num_kv_heads)
        self._head_dim = model.head_dim
        # [heads of the mesh] The model's head that lies there, -1 for none.
        self._heads = HeadLayout(model.num_heads, model.num_kv_heads, geometry.tensor).keys()

    def tokens(self, images: np.ndarray) -> np.ndarray:
        """KV [pages, page_tokens, layers, 2, kv_heads, head_dim] of images uint8 [pages, bytes]."""
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
        """Images of whole pages, as `tokens` returns them."""
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
    """The pages of an engine on every tier, read and written as KV of tokens."""

    def __init__(self, layout: ImageLayout, runner: Runner, stores: Mapping[Tier, Store]) -> None:
        self.layout = layout
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
        """Puts KV of whole pages on up to MOVE_PAGES pages of the device."""
        self._runner.write_pages(pages, self.layout.images(tokens))
