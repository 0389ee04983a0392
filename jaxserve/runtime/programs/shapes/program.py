"""All sizes that determine a program, and the shapes of all that the devices hold."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxserve.core.arithmetic import cdiv
from jaxserve.core.model_config import ModelConfig
from jaxserve.core.settings import choices
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.steps.buckets import Buckets, ProgramKey
from jaxserve.kv.layout import KVLayout
from jaxserve.models.drafters.feature_layer import FeatureLayer
from jaxserve.models.drafters.medusa import MedusaConfig
from jaxserve.models.drafters.medusa import param_specs as medusa_specs
from jaxserve.models.family import Family, Params
from jaxserve.models.lora import Adapters, of_one
from jaxserve.models.partition import local
from jaxserve.runtime.hardware.arrays import ArrayShapes, placed, tree_bytes
from jaxserve.runtime.hardware.devices import collective_rates
from jaxserve.runtime.planning.memory import group_pages, host_kv
from jaxserve.runtime.planning.shadow import ShadowSizes
from jaxserve.runtime.planning.sparf import SparFSizes
from jaxserve.runtime.programs.device_state import DeviceState
from jaxserve.runtime.programs.layout.step_layout import StepLayout
from jaxserve.runtime.programs.shapes.host_kv import HostKVShapes
from jaxserve.runtime.programs.shapes.kv import KVShapes
from jaxserve.runtime.programs.shapes.params import ParamShapes, param_rules
from jaxserve.runtime.programs.shapes.state import sampling_shapes, speculation_shapes
from jaxserve.runtime.programs.shapes.steps import step_buckets, tile_tokens
from jaxserve.runtime.weights.placement import LayerPlacement, place
from jaxserve.runtime.weights.source import ResidentWeights
from jaxserve.sampling.processors import Processors
from jaxserve.structured.bitmask import mask_words
from sharding_rules import ACTIVATIONS, STAGE, Rules


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """A smaller model that drafts, or a layer: its config and specs, partitioned as the
    target's."""

    model: ModelConfig
    family: Family
    specs: Params
    feature_layer: FeatureLayer | None = None
    """Of a layer that follows the target's hidden states."""


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
    transfers_pages: bool = False
    """Whether pages are ever gathered and scattered, not just copied."""
    across_hosts: bool = False
    """Whether the devices are those of several processes."""
    mesh: Mesh | AbstractMesh | None = None
    draft_model: DraftModel | None = None
    medusa: MedusaConfig | None = None
    lora: list[dict[str, Adapters]] | None = None
    """Specs of the adapters of each layer, partitioned; None without adapters."""
    num_host_pages: int = 0
    """Pages of sequences longer than the pool, with `kv_on` host."""

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
    def vocab_ranks(self) -> int:
        """Ranks that the vocabulary is split over."""
        return self.stages * self.tensor

    @functools.cached_property
    def local_model(self) -> ModelConfig:
        """The part of the model that one device computes."""
        return local(self.model, tensor=self.tensor, stages=self.stages)

    @property
    def feature_layer(self) -> FeatureLayer | None:
        """Of a layer that drafts from the model's hidden states; None without one."""
        return self.draft_model and self.draft_model.feature_layer

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The layers whose inputs a step keeps for a drafter."""
        return self.feature_layer.aux_layers if self.feature_layer else ()

    @functools.cached_property
    def local_draft_model(self) -> ModelConfig | None:
        """The part of a draft model that one device computes; None without one."""
        draft = self.draft_model
        return draft and local(draft.model, tensor=self.tensor, stages=1)

    @functools.cached_property
    def buckets(self) -> Buckets:
        return step_buckets(self.config, self.model, self.device)

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
            keeps_windows=self.config.kv_on == "host",  # Pages on the host have one window a group.
        )

    @property
    def tile(self) -> int | None:
        """Tokens per tile with `batch_invariant`; None for no tiling."""
        return tile_tokens(self.config, self.device)

    @property
    def attention_backend(self) -> choices.AttentionBackend:
        """The setting; in tiles, that of trees is XLA's, which alone attends along their paths."""
        in_tiles = self.config.batch_invariant and self.tree_depth
        return "xla" if in_tiles else self.config.attention_backend

    @property
    def max_width(self) -> int:
        """Most tokens of a decode: the newest and its drafts."""
        return 1 + self.config.num_speculative_tokens

    @property
    def tree_depth(self) -> int:
        """Most drafts on a path of a decode's tree; 0 where drafts follow one after another."""
        speculative = self.config.speculative_config
        return 0 if speculative is None else speculative.tree_depth

    @property
    def trash_slot(self) -> int:
        """The row of per-sequence device state that padding uses; real slots come before it."""
        return self.config.max_num_seqs

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.config.dtype)

    @functools.cached_property
    def layouts(self) -> dict[ProgramKey, StepLayout]:
        return {key: self._layout(key) for key in (*self.buckets.keys(), *self.buckets.ring_keys())}

    @property
    def max_pages(self) -> int:
        """Pages of the longest sequence."""
        return cdiv(self.config.max_model_len, self.config.page_size)

    def _layout(self, key: ProgramKey) -> StepLayout:
        context = self.buckets.ring_contexts.get(key._replace(ring=False), 0)
        return StepLayout(
            key=key,
            max_seqs=self.config.max_step_seqs,
            num_slots=self.config.max_num_seqs,
            max_pages=self.max_pages,
            kv=self.kv_layout,
            seq=self.seq,
            ring_pages=context // self.config.page_size if key.ring else 0,
            ring_scheme="pass_kv_both_ways" if self._links_both_ways else "pass_kv",
            max_width=self.max_width,
            max_prefill_tokens=self.buckets.max_prefill_tokens,
            tree_depth=self.tree_depth if key.width > 1 else 0,
            tile=self.tile,
            lora=self.lora is not None,
            host_kv=self.config.kv_on == "host",
            shares_prefixes=self.shares_prefixes,
        )

    @property
    def shares_prefixes(self) -> bool:
        """Whether decodes may read pages that they share together, which layers with a window
        never do."""
        full = self.kv_layout.groups[0].window is None
        return self.config.shared_prefix_attention == "enabled" and full

    @property
    def _links_both_ways(self) -> bool:
        return self.mesh is not None and collective_rates(self.device).both_ways

    @functools.cached_property
    def arrays(self) -> ArrayShapes:
        return ArrayShapes(self.device, self.mesh)

    def int32(self, *shape: int, spec: tuple[str, ...] = ()) -> jax.ShapeDtypeStruct:
        return self.arrays.int32(*shape, spec=spec)

    @functools.cached_property
    def params(self) -> ParamShapes:
        """Shapes of the model's parameters."""
        return self._params(self.specs)

    @functools.cached_property
    def draft_params(self) -> ParamShapes:
        """Shapes of the parameters that draft beside the model's: of another model, of heads, or of
        neither."""
        if self.medusa is not None:
            return self._params(medusa_specs(self.medusa))
        return self._params(self.draft_model and self.draft_model.specs)

    @functools.cached_property
    def adapters(self) -> ParamShapes:
        """Shapes of the buffers of all adapters."""
        return self._params(self.lora)

    @functools.cached_property
    def adapter(self) -> ParamShapes:
        """Shapes of one adapter, as it is written to a slot."""
        return self._params(jax.tree.map(of_one, self.lora))

    def _params(self, specs: Params | None) -> ParamShapes:
        return ParamShapes(specs, self.arrays, param_rules(self.config), self.dtype)

    @property
    def host_group_pages(self) -> int:
        """Host pages of a layer that are attended to together, with `kv_on` host."""
        resident = self.config.resident_kv_tokens
        return group_pages(host_kv(self.kv_layout, self.num_pages, self.num_host_pages, resident))

    @functools.cached_property
    def host_kv(self) -> HostKVShapes | None:
        """What steps read of pages on the host; None without these."""
        if self.config.kv_on != "host":
            return None
        sizes = self.kv, self.num_host_pages, self.device
        return HostKVShapes(self.config, self.model, self.layouts, *sizes)

    @functools.cached_property
    def shadow(self) -> ShadowSizes | None:
        """Sizes of compressed KV; None without compression."""
        if self.config.kv_compression != "shadow":
            return None
        return ShadowSizes.of(self.config, self.local_model, self.dtype.itemsize)

    @functools.cached_property
    def sparf(self) -> SparFSizes | None:
        """Sizes of sparse attention on the host; None without it."""
        if self.config.kv_compression != "sparf":
            return None
        return SparFSizes.of(self.config, self.model, self.dtype.itemsize)

    @functools.cached_property
    def kv(self) -> KVShapes:
        """Shapes of the pool of pages."""
        draft = self.draft_model and self.draft_model.model
        return KVShapes(self.config, self.kv_layout, self.num_pages, self.arrays, self.model, draft)

    @property
    def lora_bytes(self) -> int:
        """Bytes on one device of the adapters' buffers, and of one that is being loaded."""
        return self.adapters.num_bytes + self.adapter.num_bytes

    @property
    def weights_bytes(self) -> int:
        """Bytes on one device of the parameters that it holds at once, those of a draft model
        included."""
        return self.placement.device_bytes + self.draft_params.num_bytes

    @functools.cached_property
    def placement(self) -> LayerPlacement:
        """Which layers stay on the devices. Raises ConfigError when `resident_weight_bytes` cannot
        hold a window."""
        outside = {name: own for name, own in self.params.abstract.items() if name != "layers"}
        return place(
            self.config.weights_on,
            tree_bytes(outside),
            [tree_bytes(layer) for layer in self.params.abstract["layers"]],
            self.config.resident_weight_bytes,
        )

    @property
    def state_bytes(self) -> int:
        """Bytes on one device of the state kept across steps, without parameters, adapters and
        pages."""
        large = {"weights": ResidentWeights({}), "draft_params": None, "lora": None, "kv": []}
        kept = dataclasses.replace(self.abstract_state, **large)
        masks = [self._masks(self.sample_rows[-1])] * 2  # Of the step in flight, and the next.
        rows, features = self.config.max_num_batched_tokens, self.model.hidden_size
        array = jax.ShapeDtypeStruct((rows, features), self.dtype)
        followed = [placed(array, self.arrays.sharding())] * len(self.aux_layers)
        return tree_bytes((kept, masks, followed))

    @functools.cached_property
    def abstract_state(self) -> DeviceState:
        """Shapes of everything that the devices hold across steps."""
        slots = self.trash_slot + 1
        of_features = self.feature_layer is not None
        hidden = jax.ShapeDtypeStruct((self.model.hidden_size,), self.dtype)
        vocabulary = self.model.vocab_size, self.vocab_ranks
        return DeviceState(
            weights=ResidentWeights(self.params.abstract),
            kv=self.kv.abstract,
            tables=self.int32(
                self.stages * len(self.kv_layout.groups) * slots, self.max_pages, spec=(STAGE,)
            ),
            last_tokens=self.int32(slots),
            sampling=sampling_shapes(self.arrays, self.trash_slot, *vocabulary),
            no_masks={rows: self._masks(rows) for rows in self.sample_rows},
            speculation=speculation_shapes(
                self.arrays,
                self.config,
                *vocabulary,
                hidden if of_features or self.medusa else None,
                gained=of_features,
            ),
            draft_params=self.draft_params.abstract,
            lora=self.adapters.abstract,
            carry=self._abstract_carry if self.stages > 1 else None,
        )

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
        decodes = self.buckets.rows[-1] * self.buckets.widths[-1]
        tokens = self.buckets.max_prefill_tokens
        return self.hidden(decodes, staged=True), self.hidden(tokens, sharded=True, staged=True)

    @property
    def sampled_hidden(self) -> jax.ShapeDtypeStruct:
        """Shape of the hidden states that every step hands to sampling."""
        return self.hidden(self.sample_rows[-1])

    def prefill_hidden(self, key: ProgramKey, *, staged: bool = False) -> jax.ShapeDtypeStruct:
        """Shape of the hidden states that a step leaves of its prefill tokens: with prefill it has
        room for those of the largest step."""
        tokens = self.buckets.max_prefill_tokens if key.prefill_tokens else 0
        return self.hidden(tokens, sharded=True, staged=staged)

    def hidden(
        self, tokens: int, *, sharded: bool = False, staged: bool = False
    ) -> jax.ShapeDtypeStruct:
        """Shape of activations [tokens, hidden]. `sharded`: tokens, if any, are split over `seq`;
        `staged`: every stage has its own, concatenated."""
        rules = ACTIVATIONS if sharded and tokens else {}
        features = self.model.hidden_size
        if staged and self.stages > 1:
            rules, features = rules | {"features": STAGE}, self.stages * features
        return self._named((tokens, features), ("tokens", "features"), rules)

    def _named(self, shape: tuple[int, ...], names: tuple[str, ...], rules: Rules) -> Any:
        array = jax.ShapeDtypeStruct(shape, self.dtype)
        return placed(array, self.arrays.by_name(names, shape, rules))

    @functools.cached_property
    def processors(self) -> Processors:
        """The logits processors. Raises ConfigError for one that cannot be compiled."""
        return Processors.of(self.config.logits_processors, self.model.vocab_size)

    def describe(self) -> str:
        """Text that changes whenever any program would: the key of the executable cache."""
        settings = self.config.of_programs() | {"logits_processors": self.processors.names}
        formats = [spec.format for spec in jax.tree.leaves((self.specs, self.draft_params.specs))]
        draft = self.draft_model and self.draft_model.model
        sizes = jax.tree.map(lambda spec: spec.shape, self.draft_params.specs)
        drafts = draft, sizes, self.medusa, self.aux_layers
        pages = self.num_pages, self.num_host_pages
        return repr((settings, self.model, formats, drafts, pages))


def holding(sizes: Iterable[int], count: int) -> int:
    """The smallest of `sizes` that holds `count`."""
    return min(size for size in sizes if size >= count)
