"""All sizes that determine a program, and the sharding of each array."""

from __future__ import annotations

import dataclasses
import functools
import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxserve.core.buckets import Buckets, ProgramKey
from jaxserve.core.config import EngineConfig
from jaxserve.core.model_config import ModelConfig
from jaxserve.kv.layout import KVLayout
from jaxserve.models.family import AnySpec, Family, Params, ParamSpec
from jaxserve.models.lora import Adapters, of_one
from jaxserve.models.medusa import MedusaConfig
from jaxserve.models.medusa import param_specs as medusa_specs
from jaxserve.models.parallel import VOCAB
from jaxserve.models.partition import local
from jaxserve.runtime.devices import device_rates
from jaxserve.runtime.programs.device_state import DeviceState
from jaxserve.runtime.programs.step_layout import StepLayout
from jaxserve.runtime.programs.tiles import DEFAULT_TILE_TOKENS, TILE_TOKENS
from jaxserve.runtime.weights.placement import Placement, place
from jaxserve.runtime.weights.source import ResidentWeights
from jaxserve.sampling import BY_TOKEN, SamplingState, abstract_state
from jaxserve.sampling.processors import Processors
from jaxserve.sampling.speculation import SpeculationState, abstract_speculation
from jaxserve.structured.bitmask import mask_words
from pallas_kernels.page_copy import image_dtype, image_elements
from pallas_kernels.paged_attention import PageLayout, Pages
from pallas_kernels.quantized_matmul import QuantizedWeight
from pallas_kernels.ring_attention import choose_scheme
from sharding_rules import (
    ACTIVATIONS,
    EXPERT_PARALLEL,
    KV,
    MEGATRON,
    SEQ,
    STAGE,
    TENSOR,
    Rules,
    named_sharding,
)

RING_CHUNKS = 4
"""Ring attention is for contexts of at most this many chunks: buffers for the longest are allocated
and sent, whatever the context is."""

DECODE_LAYERS = 6
"""Layers of a decode step compiled together on CPUs (docs/decisions/002-programs.md)."""


_PARAMETERS = MEGATRON | {"vocab": VOCAB}
"""Rules for parameters: the vocabulary is split over stages too, to store no unused copies."""

_QUANTIZED_KV = {"int8": "int8", "fp8": "float8_e4m3fn"}
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
class DraftModel:
    """A smaller model that drafts: its config and specs, partitioned as the target's."""

    model: ModelConfig
    family: Family
    specs: Params


@dataclasses.dataclass(frozen=True)
class ProgramShapes:
    """All sizes that determine a program, for one resolved config and pool.

    `model` and `specs` are partitioned for the `mesh` (models/partition.py), which is None for a
    single `device`, and abstract when only planning. All devices are of the kind of `device`.
    Shapes are global; each device holds its shard.
    """

    config: EngineConfig
    model: ModelConfig
    family: Family
    specs: Params
    num_pages: int
    device: jax.Device
    moves_pages: bool = False
    """Whether pages are ever gathered and scattered, not just copied."""
    mesh: Mesh | AbstractMesh | None = None
    draft_model: DraftModel | None = None
    medusa: MedusaConfig | None = None
    lora: list[dict[str, Adapters]] | None = None
    """Specs of the adapters of each layer, partitioned; None without adapters."""

    @property
    def devices(self) -> list[jax.Device]:
        """The engine's devices, in the order of the mesh."""
        return [self.device] if self.mesh is None else list(self.mesh.devices.flat)

    @property
    def tensor(self) -> int:
        return self.config.tensor_parallel_size

    @property
    def stages(self) -> int:
        return self.config.pipeline_parallel_size

    @property
    def seq(self) -> int:
        return self.config.context_parallel_size

    @property
    def param_rules(self) -> Rules:
        """Rules for parameters."""
        whole_experts = self.config.enable_expert_parallel
        return _PARAMETERS | EXPERT_PARALLEL if whole_experts else _PARAMETERS

    @property
    def vocab_ranks(self) -> int:
        """Ranks that the vocabulary is split over."""
        return self.stages * self.tensor

    @functools.cached_property
    def local_model(self) -> ModelConfig:
        """The part of the model that one device computes."""
        return local(self.model, tensor=self.tensor, stages=self.stages)

    @functools.cached_property
    def local_draft_model(self) -> ModelConfig | None:
        """The part of a draft model that one device computes; None without one."""
        draft = self.draft_model
        return draft and local(draft.model, tensor=self.tensor, stages=1)

    @functools.cached_property
    def buckets(self) -> Buckets:
        buckets = Buckets.from_config(
            self.config.max_num_seqs,
            self.config.max_num_batched_tokens,
            pipelined=self.stages > 1,
            seq=self.seq,
            tiled=self.config.batch_invariant,
            draft_lengths=self.config.draft_lengths,
        )
        page_size, contexts = self.config.page_size, {}
        for key in buckets.keys():  # noqa: SIM118
            # Full chunks only, since short sends wait for each other.
            if key.prefill_tokens == buckets.max_prefill_tokens and (
                context := self._ring_context(key)
            ):
                contexts[key] = -(-context // page_size) * page_size
        return dataclasses.replace(buckets, ring_contexts=contexts)

    @functools.cached_property
    def kv_layout(self) -> KVLayout:
        """The KV groups of a stage's layers."""
        # A decode writes its drafts' KV, after that of the drafts of the step in flight.
        largest_decode = 1 + 2 * self.config.num_speculative_tokens
        return KVLayout.of(
            self.local_model.kv_specs,
            self.config.page_size,
            self.config.max_model_len,
            max(self.buckets.max_prefill_tokens, largest_decode),
        )

    @property
    def tile(self) -> int | None:
        """Tokens per tile with `batch_invariant`; None for no tiling."""
        if not self.config.batch_invariant:
            return None
        return TILE_TOKENS.get(self.device.platform, DEFAULT_TILE_TOKENS)

    @property
    def max_width(self) -> int:
        """Most tokens of a decode: the newest and its drafts."""
        return 1 + self.config.num_speculative_tokens

    @property
    def trash_slot(self) -> int:
        """The row of per-sequence device state that padding uses; real slots come before it."""
        return self.config.max_num_seqs

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.config.dtype)

    @property
    def pages(self) -> PageLayout:
        """One layer's pages on one device."""
        return self.pages_of(self.local_model)

    def pages_of(self, local_model: ModelConfig) -> PageLayout:
        """`pages` of a layer of a model, or of one that drafts for it."""
        return self._pages(local_model, self.num_pages, self.config.page_size // self.seq)

    def _pages(self, model: ModelConfig, num_pages: int, page_size: int) -> PageLayout:
        quantized = _QUANTIZED_KV.get(self.config.kv_cache_dtype)
        return PageLayout(
            num_pages,
            page_size,
            model.num_kv_heads,
            model.head_dim,
            jnp.dtype(quantized or self.dtype),
            scaled=quantized is not None,
            value_dim=model.value_dim if model.mla else None,
        )

    @functools.cached_property
    def layouts(self) -> dict[ProgramKey, StepLayout]:
        return {key: self._layout(key) for key in (*self.buckets.keys(), *self.buckets.ring_keys())}

    @property
    def max_pages(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.config.max_model_len // self.config.page_size)

    def _ring_context(self, key: ProgramKey) -> int:
        """Longest context, in tokens, with which a chunk that fills the step is faster by ring
        attention than by passing its queries; 0 for none, as in a pipeline, whose stages work on
        several chunks at once."""
        if self.seq == 1 or self.stages > 1 or key.prefill_tokens % (2 * self.seq):
            return 0
        if self.model.mla:  # Latents are not sent around.
            return 0
        rates = device_rates(self.device)

        def travels(context: int) -> bool:
            scheme = choose_scheme(
                new_tokens=key.prefill_tokens,
                cached_tokens=context - key.prefill_tokens,
                ranks=self.seq,
                query_heads=self.model.num_heads,
                kv_heads=self.model.num_kv_heads,
                element_bytes=self.dtype.itemsize,
                flops_per_s=rates.flops_per_s,
                link_bytes_per_s=rates.link_bytes_per_s,
            )
            return scheme == "pass_kv"

        most = min(self.max_pages * self.config.page_size, RING_CHUNKS * key.prefill_tokens)
        contexts = range(key.prefill_tokens, most + 1)
        count = bisect_left(contexts, True, key=lambda context: not travels(context))
        return contexts[count - 1] if count else 0

    def _layout(self, key: ProgramKey) -> StepLayout:
        context = self.buckets.ring_contexts.get(key._replace(ring=False), 0)
        return StepLayout(
            key=key,
            max_seqs=self.config.max_num_seqs,
            max_pages=self.max_pages,
            kv=self.kv_layout,
            seq=self.seq,
            ring_pages=context // self.config.page_size if key.ring else 0,
            ring_scheme="pass_kv_both_ways" if self._links_both_ways else "pass_kv",
            max_width=self.max_width,
            tile=self.tile,
            lora=self.lora is not None,
        )

    def groups(self, key: ProgramKey) -> list[slice]:
        """Consecutive layers that run in one program, where the model is not one program.

        Decode steps are short, so they use larger groups and fewer calls, unless layers are
        streamed one by one.
        """
        one = bool(key.prefill_tokens or self.placement.streamed)
        size, count = 1 if one else DECODE_LAYERS, self.local_model.num_layers
        return [slice(first, min(first + size, count)) for first in range(0, count, size)]

    @property
    def _links_both_ways(self) -> bool:
        return self.mesh is not None and device_rates(self.device).both_ways

    def sharding(self, *spec: str | tuple[str, ...] | None) -> Sharding:
        """Sharding of an array whose dimensions are split over these mesh axes."""
        if self.mesh is None:
            return SingleDeviceSharding(self.device)
        return NamedSharding(self.mesh, P(*spec))

    @functools.cached_property
    def param_shardings(self) -> Params:
        return self.shardings_of(self.specs)

    def shardings_of(self, specs: Params) -> Params:
        """A sharding for each parameter."""
        return jax.tree.map(self._sharding_of, specs)

    def _sharding_of(self, spec: AnySpec) -> Sharding | QuantizedWeight:
        """The sharding of a parameter; of one that is packed and split, that of each plane."""
        if not isinstance(spec, ParamSpec) or not spec.split:
            return self._by_name(spec.axes, spec.shape, self.param_rules)
        return jax.tree.map(
            lambda plane: self._by_name(
                spec.plane_axes(plane.shape[-1]), plane.shape, self.param_rules
            ),
            spec.abstract(self.dtype),
        )

    @functools.cached_property
    def abstract_params(self) -> Params:
        return self._abstract(self.specs)

    @functools.cached_property
    def _abstract_draft_params(self) -> Params | None:
        return self._abstract(self.draft_specs) if self.draft_specs else None

    @functools.cached_property
    def draft_specs(self) -> Params | None:
        """Specs of the parameters that draft beside the model's: of another model, or of heads."""
        if self.medusa is not None:
            return medusa_specs(self.medusa)
        return self.draft_model and self.draft_model.specs

    def _abstract(self, specs: Params) -> Params:
        def all_placed(spec: AnySpec, sharding: Sharding | QuantizedWeight) -> Any:
            arrays = spec.abstract(self.dtype)
            if isinstance(sharding, Sharding):
                sharding = jax.tree.map(lambda array: sharding, arrays)
            return jax.tree.map(placed, arrays, sharding)

        return jax.tree.map(all_placed, specs, self.shardings_of(specs))

    @functools.cached_property
    def abstract_lora(self) -> list[dict[str, Adapters]] | None:
        """Shapes of the buffers of all adapters."""
        return self._abstract(self.lora)

    @functools.cached_property
    def adapter(self) -> list[dict[str, Adapters]] | None:
        """As `lora`, of one adapter."""
        return jax.tree.map(of_one, self.lora)

    @functools.cached_property
    def abstract_adapter(self) -> list[dict[str, Adapters]] | None:
        """Shapes of one adapter, as it is written to a slot."""
        return self._abstract(self.adapter)

    @property
    def lora_bytes(self) -> int:
        """Bytes on one device of the adapters' buffers, and of one that is being loaded."""
        both = self.abstract_lora, self.abstract_adapter
        return tree_bytes(both)

    @property
    def weights_bytes(self) -> int:
        """Bytes on one device of the parameters that it holds at once, those of a draft model
        included."""
        return self.placement.device_bytes + tree_bytes(self._abstract_draft_params)

    @functools.cached_property
    def placement(self) -> Placement:
        """Which layers stay on the devices. Raises ConfigError when `resident_weight_bytes` cannot
        hold a window."""
        outside = {name: own for name, own in self.abstract_params.items() if name != "layers"}
        return place(
            self.config.weights_on,
            tree_bytes(outside),
            [tree_bytes(layer) for layer in self.abstract_params["layers"]],
            self.config.resident_weight_bytes,
        )

    @property
    def state_bytes(self) -> int:
        """Bytes on one device of the state kept across steps, without parameters, adapters and
        pages."""
        large = {"weights": ResidentWeights({}), "draft_params": None, "lora": None, "kv": []}
        kept = dataclasses.replace(self.abstract_state, **large)
        masks = [self._masks(self.sample_rows[-1])] * 2  # Of the step in flight, and the next.
        return tree_bytes((kept, masks))

    @functools.cached_property
    def abstract_state(self) -> DeviceState:
        """Shapes of everything that the devices hold across steps."""
        slots = self.trash_slot + 1
        return DeviceState(
            weights=ResidentWeights(self.abstract_params),
            kv=self.abstract_kv,
            tables=self.int32(
                self.stages * len(self.kv_layout.groups) * slots, self.max_pages, spec=(STAGE,)
            ),
            last_tokens=self.int32(slots),
            sampling=self._abstract_sampling,
            no_masks={rows: self._masks(rows) for rows in self.sample_rows},
            speculation=self._abstract_speculation,
            draft_params=self._abstract_draft_params,
            lora=self.abstract_lora,
            carry=self._abstract_carry if self.stages > 1 else None,
        )

    @property
    def abstract_kv(self) -> list[Pages]:
        """Shapes of the arrays of pages of a stage, each for a layer of every KV group,
        concatenated over stages; then those of a draft model's layers, with the same page ids."""
        pages = [self._abstract_pages(self.model)] * self.kv_layout.layers_per_page
        if self.draft_model is not None:
            draft = self.draft_model.model
            pages += [self._abstract_pages(draft)] * draft.num_layers
        return pages

    def _abstract_pages(self, model: ModelConfig) -> Pages:
        """Shapes of the pages of a layer of `model`."""
        pages = self._pages(model, self.stages * self.num_pages, self.config.page_size)

        def on_mesh(path: tuple[Any, ...], array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            names = PAGE_NAMES[path[0].name]
            return placed(array, self._by_name(names, array.shape, PAGES))

        return jax.tree_util.tree_map_with_path(on_mesh, pages.shapes)

    @property
    def image_bytes(self) -> int:
        """Bytes of a whole page, of all stages."""
        kv = self.abstract_kv
        return self.stages * image_elements(kv) * image_dtype(kv).itemsize

    @property
    def _abstract_sampling(self) -> SamplingState:
        state = abstract_state(self.trash_slot, self.model.vocab_size, self.vocab_ranks)

        def of(name: str) -> Sharding:
            return self.sharding(None, VOCAB) if name in BY_TOKEN else self.sharding()

        fields = dataclasses.fields(state)
        return SamplingState(**{f.name: placed(getattr(state, f.name), of(f.name)) for f in fields})

    @property
    def _abstract_speculation(self) -> SpeculationState | None:
        num_drafts = self.config.num_speculative_tokens
        if not num_drafts:
            return None
        hidden = jax.ShapeDtypeStruct((self.model.hidden_size,), self.dtype)
        state = abstract_speculation(
            self.trash_slot,
            self.config.max_model_len,
            num_drafts,
            None if self.medusa is None else hidden,
        )
        return jax.tree.map(lambda array: placed(array, self.sharding()), state)

    @functools.cached_property
    def sample_rows(self) -> tuple[int, ...]:
        """Rows that sampling programs are compiled for, ascending: a step uses the smallest that
        fits, whichever program computed its hidden states."""
        sizes = {rows * width for rows in self.buckets.rows for width in self.buckets.widths}
        return tuple(sorted({self._tiled(size) for size in sizes}))

    def sampled(self, num_rows: int, width: int) -> int:
        """Rows of the sampling program for `num_rows` sequences with `width` tokens each."""
        return self._tiled(holding(self.buckets.rows, num_rows) * width)

    def _tiled(self, count: int) -> int:
        """`count` rounded up to whole tiles."""
        return count + (-count % self.tile if self.tile else 0)

    def _masks(self, rows: int) -> jax.ShapeDtypeStruct:
        """Shape of the masks of a step that samples `rows`: one bit per token."""
        return self.int32(rows, mask_words(self.model.vocab_size))

    @property
    def _abstract_carry(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Shapes of the activations that a stage passes to the next: of decodes and of prefill
        tokens, at the largest sizes of a step."""
        rows, tokens = self.buckets.rows[-1], self.buckets.max_prefill_tokens
        return self.hidden(rows, staged=True), self.hidden(tokens, sharded=True, staged=True)

    @property
    def sampled_hidden(self) -> jax.ShapeDtypeStruct:
        """Shape of the hidden states that every step hands to sampling."""
        return self.hidden(self.sample_rows[-1])

    def hidden(
        self, tokens: int, *, sharded: bool = False, staged: bool = False
    ) -> jax.ShapeDtypeStruct:
        """Shape of activations [tokens, hidden]. `sharded`: tokens are split over `seq`;
        `staged`: every stage has its own, concatenated."""
        rules = ACTIVATIONS if sharded else {}
        features = self.model.hidden_size
        if staged and self.stages > 1:
            rules, features = rules | {"features": STAGE}, self.stages * features
        return self._named((tokens, features), ("tokens", "features"), rules)

    def int32(self, *shape: int, spec: tuple[str, ...] = ()) -> jax.ShapeDtypeStruct:
        return placed(jax.ShapeDtypeStruct(shape, jnp.int32), self.sharding(*spec))

    def staging(self, count: int, layers: int | None = None) -> jax.ShapeDtypeStruct:
        """Shape of a staging array of `count` pages, each the parts of all devices in turn; of all
        layers of a stage, or of `layers` of them."""
        kv = self.abstract_kv[:layers]
        shape = (count, self.stages * image_elements(kv))
        array = jax.ShapeDtypeStruct(shape, image_dtype(kv))
        return placed(array, self.sharding(None, (STAGE, SEQ, TENSOR)))

    def _named(self, shape: tuple[int, ...], names: tuple[str, ...], rules: Rules) -> Any:
        array = jax.ShapeDtypeStruct(shape, self.dtype)
        return placed(array, self._by_name(names, shape, rules))

    def _by_name(
        self, names: tuple[str | None, ...], shape: tuple[int, ...], rules: Rules
    ) -> Sharding:
        if self.mesh is None:
            return self.sharding()
        return named_sharding(self.mesh, names, shape, rules)

    @functools.cached_property
    def processors(self) -> Processors:
        """The logits processors. Raises ConfigError for one that cannot be compiled."""
        return Processors.of(self.config.logits_processors, self.model.vocab_size)

    def describe(self) -> str:
        """Text that changes whenever any program would: the key of the executable cache."""
        settings = self.config.of_programs() | {"logits_processors": self.processors.names}
        formats = [spec.format for spec in jax.tree.leaves((self.specs, self.draft_specs))]
        draft = self.draft_model and self.draft_model.model
        return repr((settings, self.model, formats, draft, self.medusa, self.num_pages))


def holding(sizes: Iterable[int], count: int) -> int:
    """The smallest of `sizes` that holds `count`."""
    return min(size for size in sizes if size >= count)


def placed(array: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """The shape of an array, with its sharding."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def shard_bytes(array: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array on one device."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def tree_bytes(tree: Any) -> int:
    """Bytes on one device of the arrays of a tree."""
    return sum(map(shard_bytes, jax.tree.leaves(tree)))
