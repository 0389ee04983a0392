"""Which steps copy pages from the host, which queries to it, and the shape of its pages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxserve.core.model_config import ModelConfig
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.runtime.hardware.devices import DescribedDevice
from jaxserve.runtime.hardware.host_cpu import host_device, measure
from jaxserve.runtime.planning.host_attention import HostAttention, HostRates, HostReads
from jaxserve.runtime.programs.layout.step_layout import StepLayout
from jaxserve.runtime.programs.shapes.kv import KVShapes
from pallas_kernels.paged_attention import PageLayout


@dataclasses.dataclass(frozen=True)
class HostKVShapes:
    """Of an engine with `kv_on` host: one resolved config, a partitioned `model`, the steps'
    `layouts`, and the `kv` of the devices' pools, which are of the kind of `device`. The host has
    the pages of all devices as one, with all heads."""

    config: EngineConfig
    model: ModelConfig
    layouts: Mapping[ProgramKey, StepLayout]
    kv: KVShapes
    num_pages: int
    device: jax.Device | DescribedDevice

    def __str__(self) -> str:
        """What steps do to attend to pages on the host, for a log."""
        if not self.by_queries:
            return "copy them"
        if not self.by_pages:
            return "send queries"
        sent = [key.prefill_tokens for key in self.by_queries if self.sends_queries(key)]
        decodes = ["decodes"] if not all(key.prefill_tokens for key in self.by_queries) else []
        chunks = [f"up to {max(sent):,} prefill tokens"] if any(sent) else []
        return f"send queries of {' and of '.join(decodes + chunks)}, else copy them"

    @property
    def host(self) -> jax.Device | None:
        """The device that attends to pages on the host; None where JAX has none."""
        return host_device()

    @property
    def pages(self) -> PageLayout:
        """A layer's pages on the host."""
        return self.kv.pages_of(self.model, max(1, self.num_pages))

    @property
    def _dtype(self) -> jnp.dtype:
        return jnp.dtype(self.config.dtype)

    @functools.cached_property
    def reads(self) -> HostReads:
        """Bytes that steps copy."""
        model, groups = self.model, self.kv.layout.groups
        return HostReads(
            num_layers=sum(len(group.layers) for group in groups if group.window is None),
            heads=model.num_heads,
            head_dim=model.head_dim,
            value_dim=model.value_dim,
            itemsize=self._dtype.itemsize,
            token_bytes=self.pages.page_bytes // self.config.page_size,
            links=self.config.num_devices,
        )

    @functools.cached_property
    def rates(self) -> HostRates | None:
        """Measured, the first time; None where the device is the host's CPU, or is not here."""
        if self.device.platform == "cpu" or isinstance(self.device, DescribedDevice):
            return None
        one = self.kv.pages_of(self.model, 1)
        return measure(self.device, one, self.model.num_heads, self._dtype)

    @property
    def attention(self) -> HostAttention:
        """The faster way of steps, by the rates."""
        return HostAttention(self.reads, self.rates, self.config.max_model_len)

    def sends_queries(self, key: ProgramKey) -> bool:
        """Whether such a step sends its queries to the host. One that does not copies the
        pages."""
        return key in self._senders

    @functools.cached_property
    def _senders(self) -> set[ProgramKey]:
        way = self.config.host_attention
        if way == "disabled" or self.host is None:
            return set()
        if isinstance(self.device, DescribedDevice) and self.device.platform != "cpu":
            return set()  # How fast its host attends is unknown.
        if way == "enabled":
            return {*self.layouts}
        attention = self.attention
        return {
            key for key in self.layouts if attention.sends_queries(key.rows, key.prefill_tokens)
        }

    @functools.cached_property
    def by_queries(self) -> list[ProgramKey]:
        """The steps that send queries: those of decodes with SparF too, which only the host has."""
        of_sparf = self.config.kv_compression == "sparf"
        return [
            key
            for key in self.layouts
            if (self._reads_all(key) and self.sends_queries(key)) or (of_sparf and key.rows)
        ]

    @functools.cached_property
    def by_pages(self) -> list[ProgramKey]:
        """The steps that copy pages."""
        return [key for key in self.layouts if self._reads_all(key) and not self.sends_queries(key)]

    def _reads_all(self, key: ProgramKey) -> bool:
        """Whether such a step attends to all of a sequence's pages on the host, as decodes with
        compression do not."""
        return bool(key.prefill_tokens) or self.config.kv_compression == "none"

    def rows_to_host(self, key: ProgramKey) -> range:
        """The rows of such a step that send queries."""
        layout, compression = self.layouts[key], self.config.kv_compression
        first = key.rows if compression == "shadow" else 0
        if self.sends_queries(key):
            return range(first, layout.rows)
        return range(key.rows if compression == "sparf" else 0)

    def rows_to_device(self, key: ProgramKey) -> range:
        """The rows of such a step whose pages are copied."""
        if self.sends_queries(key):
            return range(0)
        compressed = self.config.kv_compression != "none"
        return range(key.rows if compressed else 0, self.layouts[key].rows)

    @property
    def has_window(self) -> bool:
        """Whether pages are ever copied to the device, for attention or to be compressed."""
        return bool(self.by_pages) or self.config.kv_compression == "shadow"
