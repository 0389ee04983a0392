"""The enumerated set of programs of one engine: names, functions, shapes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxserve.errors import ConfigError
from jaxserve.kv.transfers import MOVE_PAGES, MOVE_SIZES
from jaxserve.models.config import LayerKind
from jaxserve.models.family import Params
from jaxserve.models.parallel import tokens_apart
from jaxserve.runtime import step
from jaxserve.runtime.batch import StepLayout, set_tables
from jaxserve.runtime.buckets import ProgramKey
from jaxserve.runtime.device_rates import device_rates
from jaxserve.runtime.geometry import Geometry, placed
from jaxserve.runtime.programs import ProgramSpec
from jaxserve.sampling import admit
from jaxserve.sampling.rows import NUM_FIELDS
from pallas_kernels import backends
from pallas_kernels.page_copy import copy_pages, gather_pages, scatter_pages
from pallas_kernels.paged_attention import (
    KVPages,
    RaggedBatch,
    paged_attention,
    write_kv,
)
from sharding_rules import SEQ, STAGE

COPY_PAGES = 8
"""Pages that the program which copies them takes."""

ADMIT = "admit"
COPY = "copy"
SET_TABLES = "set-tables"


def part_name(part: str, key: ProgramKey) -> str:
    """Name of a program of the model: `part` is forward, or begin or finish."""
    return f"{part}-{key.rows}-{key.prefill_tokens}{'-ring' if key.ring else ''}"


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
    """Name of a program that moves pages: `move` is gather or scatter, or the same of one layer,
    gather-layer or scatter-layer."""
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
    pages, model = geometry.pages, geometry.local_model
    layout = geometry.layouts[geometry.buckets.keys()[-1]]
    q = jax.ShapeDtypeStruct(
        (layout.key.num_tokens, model.num_heads, model.head_dim), geometry.dtype
    )
    rows = jax.ShapeDtypeStruct((layout.rows,), jnp.int32)
    tables = jax.ShapeDtypeStruct((layout.rows, layout.max_pages), jnp.int32)
    batch = RaggedBatch(tables, rows, rows, rows)
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
    kv, tables = geometry.abstract_kv, geometry.abstract_tables
    family, model = geometry.family, geometry.local_model
    params, last_tokens = geometry.abstract_params, geometry.abstract_last_tokens
    if geometry.stages == 1:
        yield ProgramSpec(
            part_name("forward", layout.key),
            _between_layers(
                geometry, layout, functools.partial(step.forward, family, model, layout)
            ),
            (params, kv, tables, last_tokens, geometry.int32(layout.size)),
            donated=(1, 2),
            outputs=(_specs(kv), _specs(tables), P(), P(None, SEQ)),
        )
        return
    carry = geometry.abstract_carry
    yield ProgramSpec(
        part_name("tick", layout.key),
        _between_layers(geometry, layout, functools.partial(step.tick, family, model, layout)),
        (params, kv, tables, carry, last_tokens, geometry.int32(geometry.stages, layout.size)),
        donated=(1, 2, 3),
        outputs=(_specs(kv), _specs(tables), _specs(carry), P(), P(STAGE, SEQ)),
    )


def _layer_specs(geometry: Geometry, layout: StepLayout) -> Iterator[ProgramSpec]:
    """The model as a program before its layers, one for each kind of group, and one after."""
    family, model, params = geometry.family, geometry.local_model, geometry.abstract_params
    outside = outside_layers(params)
    begin = functools.partial(step.begin, family, model, layout)
    begins = ProgramSpec(
        part_name("begin", layout.key),
        begin,
        (
            outside,
            geometry.abstract_tables,
            geometry.abstract_last_tokens,
            geometry.int32(layout.size),
        ),
        donated=(1,),
        outputs=P(),
    )
    yield begins
    _, x, shared, addresses, sampled = jax.tree.map(
        lambda array: placed(array, geometry.sharding()), begins.results()
    )
    alike = {layers_name(layout.key, model.layer_kinds[g]): g for g in geometry.groups(layout.key)}
    for name, group in alike.items():
        layers = functools.partial(step.layers, family, model, layout, model.layer_kinds[group])
        kv = geometry.abstract_kv[group]
        yield ProgramSpec(
            name,
            _between_layers(geometry, layout, layers),
            (params["layers"][group], kv, x, shared, addresses),
            donated=(1, 2),
            outputs=(_specs(kv), P()),
        )
    finish = functools.partial(step.finish, family, model, layout)
    yield ProgramSpec(part_name("finish", layout.key), finish, (outside, x, sampled), outputs=P())


def _between_layers(
    geometry: Geometry, layout: StepLayout, function: Callable[..., Any]
) -> Callable[..., Any]:
    """`function` with the tokens between its layers shared out to the ranks of `tensor`, where that
    is asked for. Decodes alone are few, and their sums better left whole."""
    own_tokens = layout.key.rows + layout.key.prefill_tokens // geometry.seq
    if not geometry.config.sequence_parallel_norms or not layout.key.prefill_tokens:
        return function
    if geometry.tensor == 1 or own_tokens % geometry.tensor:
        return function
    return tokens_apart(device_rates(geometry.device))(function)


def _sampling_specs(geometry: Geometry) -> Iterator[ProgramSpec]:
    family, model, int32 = geometry.family, geometry.local_model, geometry.int32
    head, last_tokens = outside_layers(geometry.abstract_params), geometry.abstract_last_tokens
    state, hidden = geometry.abstract_state, geometry.hidden(geometry.sample_rows[-1])
    for rows in geometry.sample_rows:
        yield ProgramSpec(
            sample_name("greedy", rows),
            functools.partial(step.greedy, family, model, geometry.tile),
            (head, last_tokens, hidden, int32(rows)),
            donated=(1,),
            outputs=P(),
        )
        yield ProgramSpec(
            sample_name("general", rows),
            functools.partial(step.general, family, model, geometry.tile),
            (
                head,
                last_tokens,
                state,
                hidden,
                int32(rows, NUM_FIELDS),
                geometry.masks(rows),
            ),
            donated=(1, 2),
            outputs=(P(), _specs(state), P()),
        )
    for tokens in geometry.buckets.prefill_tokens:
        yield ProgramSpec(
            prompt_logprobs_name(tokens),
            functools.partial(step.prompt_logprobs, family, model, geometry.tile),
            (
                head,
                geometry.hidden(tokens, dealt=True, staged=True),
                int32(tokens, spec=(SEQ,)),
            ),
            outputs=P(SEQ),
        )
    slot_size = sum(array.size // array.shape[0] for array in jax.tree.leaves(state))
    yield ProgramSpec(
        ADMIT,
        admit,
        (state, int32(), int32(slot_size)),
        donated=(0,),
        outputs=_specs(state),
    )


def _page_specs(geometry: Geometry) -> Iterator[ProgramSpec]:
    kv, int32 = geometry.abstract_kv, geometry.int32
    of_kv = _specs(kv)

    tables, stages = geometry.abstract_tables, geometry.stages
    yield ProgramSpec(
        SET_TABLES,
        functools.partial(set_tables, stages),
        (tables, int32(stages), int32(stages, geometry.max_pages)),
        donated=(0,),
        outputs=_specs(tables),
    )
    pages = int32(COPY_PAGES)
    yield ProgramSpec(COPY, copy_pages, (kv, pages, pages), donated=(0,), outputs=of_kv)
    # One layer's, for any layer: for moves that are rare, and programs that are ready at once.
    yield from _moves(geometry, MOVE_PAGES, "-layer", kv[:1], geometry.staging(MOVE_PAGES, 1))
    if geometry.moves_pages:
        for count in MOVE_SIZES:
            yield from _moves(geometry, count, "", kv, geometry.staging(count))


def _moves(
    geometry: Geometry,
    count: int,
    suffix: str,
    layers: list[KVPages],
    staging: jax.ShapeDtypeStruct,
) -> Iterator[ProgramSpec]:
    pages = geometry.int32(count)
    yield ProgramSpec(
        page_name(f"gather{suffix}", count),
        gather_pages,
        (layers, pages),
        outputs=staging.sharding.spec if geometry.mesh else None,
    )
    yield ProgramSpec(
        page_name(f"scatter{suffix}", count),
        scatter_pages,
        (layers, pages, staging),
        donated=(0,),
        outputs=_specs(layers),
    )


def _specs(arrays: Any) -> Any:
    """PartitionSpecs of placed arrays; of no use where there is no mesh."""
    return jax.tree.map(lambda array: getattr(array.sharding, "spec", None), arrays)


def outside_layers(params: Params) -> Params:
    """The parameters outside the layers: embeddings, final norm, head."""
    return {name: value for name, value in params.items() if name != "layers"}
