"""Conversion between page bytes and the KV of tokens.

The layout of page bytes depends on the engine: the parts of all its devices in turn (by stage, then
by share of the page's tokens, then by heads), each with all layers of the stage: keys `[heads,
head_dim, tokens]`, values `[heads, tokens, head_dim]` and, of quantized pages, scales `[heads, 2,
tokens]`. Heads may be replicated, or padding. The KV of a token, `[layers, 2, kv_heads, head_dim]`,
keys before values, is the same for engines of any page size and any mesh. Quantized, it is bytes,
and each head's elements are followed by their scale. Latents are keys without values, so there the
2 is a 1. The layers of what drafts come last in each device's part; their KV is apart from that of
the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxserve.core.errors import SnapshotError
from jaxserve.core.model_config import ModelConfig
from jaxserve.kv.layout import TRANSFER_PAGES
from jaxserve.kv.offload.stores import Store
from jaxserve.kv.tier import Tier
from jaxserve.runtime.programs.shapes.program import ProgramShapes
from jaxserve.runtime.runner import Runner
from jaxserve.runtime.startup.engine_plan import EnginePlan
from sharding_rules import HeadLayout


class PageBytesLayout:
    """Location of each token's KV of one model in the bytes of a page: its layers are those `after`
    another's, if that is not None."""

    def __init__(
        self,
        shapes: ProgramShapes,
        model: ModelConfig,
        local_model: ModelConfig,
        after: PageBytesLayout | None = None,
    ) -> None:
        """`model` is the config of the checkpoint, not the partitioned one of `shapes`, and
        `local_model` its part on a device."""
        pages = shapes.kv.pages_of(local_model)
        self.dtype = np.dtype(np.uint8 if pages.scaled else pages.dtype)
        self.page_tokens = shapes.config.page_size
        self._scale_bytes = np.dtype(np.float32).itemsize if pages.scaled else 0
        width = pages.elements_per_head + self._scale_bytes
        self.token_shape = (model.num_layers, 1 if model.mla else 2, model.num_kv_heads, width)
        self._mesh = (shapes.stages, shapes.seq, shapes.tensor)
        self._local = (local_model.num_layers, local_model.num_kv_heads)
        self._elements = pages.elements_per_head
        # [heads of the mesh] Index of the model's head, -1 for padding.
        self._heads = HeadLayout(model.num_heads, model.num_kv_heads, shapes.tensor).keys()
        share = self.page_tokens // shapes.seq
        self._of_layer = self.token_shape[1] * local_model.num_kv_heads * share * width
        self._first = 0 if after is None else after._stop
        self._stop = self._first + local_model.num_layers * self._of_layer

    def tokens(self, payload: np.ndarray) -> np.ndarray:
        """KV [pages, page_tokens, *token_shape] of page bytes [pages, bytes]."""
        count, dim, share = len(payload), self._elements, self.page_tokens // self._mesh[1]
        (layers, heads), sides = self._local, self.token_shape[1]
        size = heads * share * dim
        parts = payload.view(self.dtype).reshape(count, math.prod(self._mesh), -1)
        parts = parts[..., self._first : self._stop]
        parts = parts.reshape(count, *self._mesh, layers, self._of_layer)
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

    def page_bytes(self, tokens: np.ndarray) -> np.ndarray:
        """The bytes uint8 [pages, devices, bytes] of these layers on each device, for KV in the
        shape that `tokens` returns."""
        (stages, shares, ranks), (layers, heads), dim = self._mesh, self._local, self._elements
        there, sides = (self._heads >= 0)[:, None], self.token_shape[1]
        whole = np.where(there, tokens[..., self._heads, :], np.zeros((), self.dtype))
        both = whole.reshape(
            len(tokens), shares, -1, stages, layers, sides, ranks, heads, self.token_shape[3]
        ).transpose(0, 3, 1, 6, 4, 5, 7, 2, 8)
        k, v = both[..., 0, :, :, :dim].swapaxes(-1, -2), both[..., 1:, :, :, :dim]
        scales = both[..., dim:].swapaxes(5, 6)
        flat = [np.ascontiguousarray(part).reshape(*both.shape[:5], -1) for part in (k, v, scales)]
        parts = np.concatenate(flat, axis=-1)
        return parts.reshape(len(tokens), math.prod(self._mesh), -1).view(np.uint8)

    def checked(self, tokens: np.ndarray) -> np.ndarray:
        """`tokens`. Raises SnapshotError for KV of another shape or dtype."""
        if tokens.shape[2:] != self.token_shape or tokens.dtype != self.dtype:
            raise SnapshotError(
                f"a token's KV is {tokens.dtype} {list(tokens.shape[2:])} in the snapshot, and "
                f"{self.dtype} {list(self.token_shape)} in this engine."
            )
        return tokens


class TokenKV:
    """Reads an engine's pages on any tier, and writes those of the device, as KV of tokens: of the
    model, and of the layers that draft for it, if there are any."""

    def __init__(
        self,
        plan: EnginePlan,
        runner: Runner,
        stores: Mapping[Tier, Store],
    ) -> None:
        """`stores`: the contents of the lower tiers."""
        shapes = runner.shapes
        layouts = [PageBytesLayout(shapes, plan.checkpoint.config, shapes.local_model)]
        if plan.drafting_layers is not None:
            own = plan.drafting_layers, shapes.local_draft_model
            layouts.append(PageBytesLayout(shapes, *own, after=layouts[-1]))
        self.layouts = tuple(layouts)
        self.page_tokens = layouts[0].page_tokens
        numbers = sum(math.prod(layout.token_shape) for layout in layouts)
        self.page_bytes = self.page_tokens * numbers * layouts[0].dtype.itemsize
        self._shapes = shapes
        self._runner: Runner | None = runner
        self._stores = stores

    def read(self, tier: Tier, pages: Sequence[int]) -> list[np.ndarray]:
        """KV of up to TRANSFER_PAGES pages, as `PageBytesLayout.tokens` returns it, by layout.

        Raises PageCorruptError or OSError where a lower tier cannot be read.
        """
        on_device = tier is Tier.DEVICE
        payload = self._runner.read_pages(pages) if on_device else self._stores[tier].read(pages)
        return [layout.tokens(payload) for layout in self.layouts]

    def take(self, pages: Sequence[int]) -> Callable[[], list[np.ndarray]]:
        """As `read`, of pages of the device as they are now: what it returns reads them later, in
        any thread, while steps continue."""
        layers, runner = self._runner.take_pages(pages), self._runner

        def read() -> list[np.ndarray]:
            payload = runner.page_bytes(layers, len(pages))
            return [layout.tokens(payload) for layout in self.layouts]

        return read

    def to_pages(self, tokens: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Up to TRANSFER_PAGES whole pages with this KV, by layout, for `write`: an array
        [TRANSFER_PAGES, elements] for each layer on a device. Any thread may call it. Layers that
        draft have zeros where it is of the model alone.

        Raises SnapshotError for KV of another shape or dtype.
        """
        found = [layout.checked(own) for layout, own in zip(self.layouts, tokens)]
        num_pages = len(found[0])
        for layout in self.layouts[len(found) :]:
            found.append(np.zeros((num_pages, self.page_tokens, *layout.token_shape), layout.dtype))
        parts = [layout.page_bytes(own) for layout, own in zip(self.layouts, found)]
        whole, kv, done, layers = np.concatenate(parts, axis=-1), self._shapes.kv, 0, []
        for first in kv.alike:
            place = kv.staging(TRANSFER_PAGES, 1, first)
            layer = np.zeros(place.shape, place.dtype)
            own, size = whole.view(place.dtype), layer.shape[1] // whole.shape[1]
            layer[:num_pages] = own[:, :, done : done + size].reshape(num_pages, -1)
            layers.append(layer)
            done += size
        return layers

    def write(self, pages: Sequence[int], content: Sequence[np.ndarray]) -> None:
        """Writes the first of what `to_pages` returns to these pages of the device."""
        self._runner.write_pages(pages, content)

    def close(self) -> None:
        """Releases the device. Idempotent."""
        self._runner = None
