"""The enumerated set of programs of one engine: names, functions, shapes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.kv.transfers import MOVE_SIZES
from jaxserve.models.config import LayerKind, ModelConfig
from jaxserve.models.family import Family, Params
from jaxserve.runtime import step
from jaxserve.runtime.batch import StepLayout
from jaxserve.runtime.buckets import Buckets, ProgramKey
from jaxserve.runtime.programs import ProgramSpec
from jaxserve.sampling import admit, init_state
from jaxserve.sampling.rows import NUM_FIELDS
from pallas_kernels import backends
from pallas_kernels.page_copy import copy_pages, gather_pages, scatter_pages
from pallas_kernels.paged_attention import (
    KVPages,
    PageLayout,
    RaggedBatch,
    paged_attention,
    write_kv,
)

COPY_PAGES = 8
"""Pages that the program which copies them takes."""

MAX_PREFILL_CHUNKS = 8
"""Sequences that can prefill in one step: each costs a row of metadata and of logits."""


DECODE_LAYERS = 6
"""Layers of a decode step compiled together on CPUs (docs/decisions/002-programs.md)."""


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Every size that shapes a program, for one resolved config and pool."""

    config: EngineConfig
    model: ModelConfig
    family: Family
    specs: Params
    num_pages: int
    moves_pages: bool = False
    """Whether pages are ever gathered and scattered, and not just copied."""

    @functools.cached_property
    def buckets(self) -> Buckets:
        return Buckets.from_config(self.config.max_num_seqs, self.config.max_num_batched_tokens)

    @property
    def max_chunks(self) -> int:
        return min(MAX_PREFILL_CHUNKS, self.config.max_num_seqs)

    @property
    def trash_slot(self) -> int:
        """The row of per-sequence device state that padding uses; real slots come before it."""
        return self.config.max_num_seqs

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.config.dtype)

    @property
    def pages(self) -> PageLayout:
        model = self.model
        return PageLayout(
            self.num_pages, self.config.page_size, model.num_kv_heads, model.head_dim, self.dtype
        )

    @functools.cached_property
    def layouts(self) -> dict[ProgramKey, StepLayout]:
        keys = self.buckets.keys()
        return {key: self._layout(key) for key in keys}

    def _layout(self, key: ProgramKey) -> StepLayout:
        chunks = self.max_chunks if key.prefill_tokens else 0
        most = min(key.rows + chunks, self.config.max_num_seqs)
        sample_rows = next(rows for rows in self.buckets.rows if rows >= most)
        return StepLayout(
            key=key,
            max_chunks=self.max_chunks,
            max_pages=-(-self.config.max_model_len // self.config.page_size),
            page_size=self.config.page_size,
            sample_rows=sample_rows,
            trash_slot=self.trash_slot,
        )

    def groups(self, key: ProgramKey) -> list[slice]:
        """Consecutive layers that run in one program, where the model is not one program.

        A decode step is short, so it is made of fewer calls.
        """
        size, count = 1 if key.prefill_tokens else DECODE_LAYERS, self.model.num_layers
        return [slice(first, min(first + size, count)) for first in range(0, count, size)]

    @functools.cached_property
    def abstract_params(self) -> Params:
        return jax.tree.map(lambda spec: spec.abstract(self.dtype), self.specs)

    @property
    def abstract_kv(self) -> list[KVPages]:
        """Shapes of the pages of every layer."""
        return [self.pages.shapes for _ in range(self.model.num_layers)]

    @property
    def abstract_last_tokens(self) -> jax.ShapeDtypeStruct:
        """Shape of the newest token of every slot, the trash slot included."""
        return _int32(self.trash_slot + 1)

    def describe(self) -> str:
        """Text that changes whenever any program would: the key of the executable cache."""
        config = dataclasses.asdict(self.config)
        for irrelevant in (
            "model",
            "load_format",
            "seed",
            "scheduler",
            "memory_utilization",
            "kv_cache_memory_bytes",
            "compilation_cache",
            "fair_share",
            "enable_prefix_caching",
            "host_kv_bytes",
            "disk_kv_dir",
            "disk_kv_bytes",
            "preemption",
            "debug_kv",
        ):
            del config[irrelevant]
        formats = [spec.format for spec in jax.tree.leaves(self.specs)]
        return repr((sorted(config.items()), self.model, formats, self.num_pages, self.max_chunks))


ADMIT = "admit"
COPY = "copy"


def part_name(part: str, key: ProgramKey) -> str:
    """Name of a program of the model: `part` is forward, or begin or finish."""
    return f"{part}-{key.rows}-{key.prefill_tokens}"


def layers_name(key: ProgramKey, kinds: Sequence[LayerKind]) -> str:
    """Name of the program of a group of layers: runs of equal kinds, counted."""
    runs = (
        f"{len(list(run))}x{kind.window or 'full'}{'' if kind.rotates else '-unrotated'}"
        for kind, run in itertools.groupby(kinds)
    )
    return f"{part_name('layers', key)}-{'+'.join(runs)}"


def sample_name(sampler: str, rows: int) -> str:
    """Name of a sampling program: `sampler` is greedy or general."""
    return f"{sampler}-{rows}"


def page_name(move: str, count: int) -> str:
    """Name of a program that moves pages: `move` is gather or scatter."""
    return f"{move}-{count}"


def prompt_logprobs_name(prefill_tokens: int) -> str:
    return f"prompt-logprobs-{prefill_tokens}"


def program_specs(geometry: Geometry) -> list[ProgramSpec]:
    """Every program the engine can ever call, the largest first so that threads end together."""
    forward = _layer_specs if geometry.config.program_scope == "layer" else _step_specs
    backend = geometry.config.attention_backend
    with backends.using(backend):
        specs = [spec for layout in geometry.layouts.values() for spec in forward(geometry, layout)]
        specs += _sampling_specs(geometry)
        specs += _page_specs(geometry)
    # Functions are traced later, and elsewhere.
    traced = backends.using(backend)
    return [dataclasses.replace(spec, function=traced(spec.function)) for spec in reversed(specs)]


def check_attention(geometry: Geometry) -> None:
    """Raises ConfigError when the attention backend cannot do the model's shapes, or its pages."""
    pages, model = geometry.pages, geometry.model
    layout = geometry.layouts[geometry.buckets.keys()[-1]]
    q = jax.ShapeDtypeStruct(
        (layout.key.num_tokens, model.num_heads, model.head_dim), geometry.dtype
    )
    rows = _int32(layout.rows)
    batch = RaggedBatch(_int32(layout.rows, layout.max_pages), rows, rows, rows)
    backend = geometry.config.attention_backend

    def all_of_it(q, pages, batch):
        scale, num_decodes = model.attention_scale, layout.key.rows
        attended = paged_attention(q, pages, batch, num_decodes=num_decodes, scale=scale)
        new, places = q[:, : model.num_kv_heads], jnp.zeros(len(q), jnp.int32)
        pages = write_kv(pages, new, new, places, places)
        return attended, copy_pages([pages], batch.starts, batch.starts)

    try:
        with backends.using(backend):
            jax.eval_shape(all_of_it, q, pages.shapes, batch)
    except ValueError as error:
        raise ConfigError(f"attention_backend is {backend!r}. {error}") from error


def _step_specs(geometry: Geometry, layout: StepLayout) -> Iterator[ProgramSpec]:
    """The model as one program."""
    yield ProgramSpec(
        part_name("forward", layout.key),
        functools.partial(step.forward, geometry.family, geometry.model, layout),
        (
            geometry.abstract_params,
            geometry.abstract_kv,
            geometry.abstract_last_tokens,
            _int32(layout.size),
        ),
        donated=(1,),
    )


def _layer_specs(geometry: Geometry, layout: StepLayout) -> Iterator[ProgramSpec]:
    """The model as a program before its layers, one for each kind of group, and one after."""
    family, model, params = geometry.family, geometry.model, geometry.abstract_params
    outside = outside_layers(params)
    begin = functools.partial(step.begin, family, model, layout)
    begin_arguments = (outside, geometry.abstract_last_tokens, _int32(layout.size))
    yield ProgramSpec(part_name("begin", layout.key), begin, begin_arguments)
    x, shared, addresses, sampled = jax.eval_shape(begin, *begin_arguments)
    alike = {layers_name(layout.key, model.layer_kinds[g]): g for g in geometry.groups(layout.key)}
    for name, group in alike.items():
        yield ProgramSpec(
            name,
            functools.partial(step.layers, family, model, layout, model.layer_kinds[group]),
            (params["layers"][group], geometry.abstract_kv[group], x, shared, addresses),
            donated=(1, 2),
        )
    finish = functools.partial(step.finish, family, model, layout)
    yield ProgramSpec(part_name("finish", layout.key), finish, (outside, x, sampled))


def _sampling_specs(geometry: Geometry) -> Iterator[ProgramSpec]:
    family, model = geometry.family, geometry.model
    head, last_tokens = outside_layers(geometry.abstract_params), geometry.abstract_last_tokens
    state = jax.eval_shape(lambda: init_state(geometry.trash_slot, model.vocab_size))

    def hidden(tokens: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((model.hidden_size, tokens), geometry.dtype)

    for rows in sorted({layout.sample_rows for layout in geometry.layouts.values()}):
        yield ProgramSpec(
            sample_name("greedy", rows),
            functools.partial(step.greedy, family, model),
            (head, last_tokens, hidden(rows), _int32(rows)),
            donated=(1,),
        )
        yield ProgramSpec(
            sample_name("general", rows),
            functools.partial(step.general, family, model),
            (head, last_tokens, state, hidden(rows), _int32(rows, NUM_FIELDS)),
            donated=(1, 2),
        )
    for tokens in geometry.buckets.prefill_tokens:
        yield ProgramSpec(
            prompt_logprobs_name(tokens),
            functools.partial(step.prompt_logprobs, family, model),
            (head, hidden(tokens), _int32(tokens)),
        )
    slot_size = sum(array.size // array.shape[0] for array in jax.tree.leaves(state))
    yield ProgramSpec(ADMIT, admit, (state, _int32(), _int32(slot_size)), donated=(0,))


def _page_specs(geometry: Geometry) -> Iterator[ProgramSpec]:
    kv = geometry.abstract_kv
    pages = _int32(COPY_PAGES)
    yield ProgramSpec(COPY, copy_pages, (kv, pages, pages), donated=(0,))
    if not geometry.moves_pages:
        return
    for count in MOVE_SIZES:
        pages = _int32(count)
        staging = jax.eval_shape(gather_pages, kv, pages)
        yield ProgramSpec(page_name("gather", count), gather_pages, (kv, pages))
        yield ProgramSpec(
            page_name("scatter", count), scatter_pages, (kv, pages, staging), donated=(0,)
        )


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def outside_layers(params: Params) -> Params:
    """The parameters outside the layers: embeddings, final norm, head."""
    return {name: value for name, value in params.items() if name != "layers"}
