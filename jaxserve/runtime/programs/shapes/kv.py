"""Shapes of the KV pages on the devices, and of the arrays that move them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.core.model_config import ModelConfig
from jaxserve.core.settings.config import EngineConfig
from jaxserve.kv.layout import KVLayout
from jaxserve.models.partition import local
from jaxserve.runtime.hardware.arrays import ArrayShapes, placed
from pallas_kernels.page_copy import row_dtype, row_elements
from pallas_kernels.paged_attention import PageLayout, Pages
from sharding_rules import KV, SEQ, STAGE, TENSOR

_QUANTIZED_KV = {"int8": "int8", "fp8": "float8_e4m3fn", "int4": "uint8"}
"""Dtypes of the elements of quantized pages, by kv_cache_dtype."""

PAGE_NAMES = {
    "k": ("pages", "kv_heads", "head_dim", "page_tokens"),
    "v": ("pages", "kv_heads", "page_tokens", "head_dim"),
    "scales": ("pages", "kv_heads", "key_value", "page_tokens"),
}
"""Names of the dimensions of each array of a layer's pages."""

PAGES = KV | {"pages": STAGE}
"""Rules for pages: a stage holds the pages of its own layers, with the same page ids as others."""


@dataclasses.dataclass(frozen=True)
class KVShapes:
    """Shapes of a pool of `num_pages` on the devices of `arrays`, for one resolved config.

    `model` is partitioned, and `layout` has the KV groups of a stage's layers; `draft` is a
    partitioned model that drafts, None without one.
    """

    config: EngineConfig
    layout: KVLayout
    num_pages: int
    arrays: ArrayShapes
    model: ModelConfig
    draft: ModelConfig | None = None

    @property
    def _stages(self) -> int:
        return self.config.pipeline_parallel_size

    @property
    def pages(self) -> PageLayout:
        """One layer's pages on one device."""
        size = self.config.tensor_parallel_size
        return self.pages_of(local(self.model, tensor=size, stages=self._stages))

    def pages_of(self, local_model: ModelConfig, num_pages: int | None = None) -> PageLayout:
        """`pages` of a layer of a model, or of one that drafts for it; or so many such pages."""
        page_size = self.config.page_size // self.config.context_parallel_size
        return self._pages(local_model, num_pages or self.num_pages, page_size)

    def _pages(self, model: ModelConfig, num_pages: int, page_size: int) -> PageLayout:
        quantized = _QUANTIZED_KV.get(self.config.kv_cache_dtype)
        return PageLayout(
            num_pages,
            page_size,
            model.num_kv_heads,
            model.head_dim,
            jnp.dtype(quantized or self.config.dtype),
            scaled=quantized is not None,
            value_dim=model.value_dim if model.mla else None,
        )

    @property
    def abstract(self) -> list[Pages]:
        """Shapes of the arrays of pages of a stage, each for a layer of every KV group,
        concatenated over stages; then those of a draft model's layers, with the same page ids."""
        pages = [self._abstract_pages(self.model)] * self.layout.layers_per_page
        if self.draft is not None:
            pages += [self._abstract_pages(self.draft)] * self.draft.num_layers
        return pages

    @property
    def alike(self) -> list[int]:
        """For each of these arrays the first one of the same shapes."""
        return [self.abstract.index(pages) for pages in self.abstract]

    def _abstract_pages(self, model: ModelConfig) -> Pages:
        """Shapes of the pages of a layer of `model`."""
        pages = self._pages(model, self._stages * self.num_pages, self.config.page_size)

        def on_mesh(path: tuple[Any, ...], array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            names = PAGE_NAMES[path[0].name]
            return placed(array, self.arrays.by_name(names, array.shape, PAGES))

        return jax.tree_util.tree_map_with_path(on_mesh, pages.shapes)

    @property
    def whole_page_bytes(self) -> int:
        """Bytes of a whole page, of all stages."""
        kv = self.abstract
        return self._stages * row_elements(kv) * row_dtype(kv).itemsize

    def staging(
        self, count: int, layers: int | None = None, first: int = 0
    ) -> jax.ShapeDtypeStruct:
        """Shape of a staging array of `count` pages, each the parts of all devices in turn; of all
        layers of a stage, or of `layers` of them from `first` on."""
        kv = self.abstract[first:][:layers]
        shape = (count, self._stages * row_elements(kv))
        array = jax.ShapeDtypeStruct(shape, row_dtype(kv))
        return placed(array, self.arrays.sharding(None, (STAGE, SEQ, TENSOR)))
