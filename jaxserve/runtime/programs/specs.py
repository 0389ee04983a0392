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

from jaxserve.core.buckets import ProgramKey
from jaxserve.core.errors import ConfigError
from jaxserve.core.model_config import LayerKind
from jaxserve.kv.transfers import MOVE_PAGES, MOVE_SIZES
from jaxserve.models.family import Params
from jaxserve.models.parallel import sequence_parallel
from jaxserve.runtime.device_rates import device_rates
from jaxserve.runtime.programs import step
from jaxserve.runtime.programs.executables import ProgramSpec
from jaxserve.runtime.programs.program_shapes import ProgramShapes, placed
from jaxserve.runtime.programs.step_layout import StepLayout, set_tables
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
"""Pages per call of the copy program."""

ADMIT = "admit"
COPY = "copy"
SET_TABLES = "set-tables"


def part_name(part: str, key: ProgramKey) -> str:
    """Name of a model program: `part` is forward, pipeline-step, embed, layers or final-norm."""
    return f"{part}-{key.name}"


def layers_name(key: ProgramKey, kinds: Sequence[LayerKind]) -> str:
    """Name of the program of a group of layers: length and kind of each run of equal layers."""
    runs = (
        f"{len(list(run))}x{kind.window or 'full'}{'' if kind.rotates else '-unrotated'}"
        for kind, run in itertools.groupby(kinds)
    )
    return f"{part_name('layers', key)}-{'+'.join(runs)}"


def sample_name(sampler: str, rows: int) -> str:
    """Name of a sampling program: `sampler` is greedy or general."""
    return f"{sampler}-{rows}"


def page_name(move: str, count: int) -> str:
    """Name of a page transfer program: `move` is gather or scatter, or for a single layer
    gather-layer or scatter-layer."""
    return f"{move}-{count}"


def prompt_logprobs_name(prefill_tokens: int) -> str:
    return f"prompt-logprobs-{prefill_tokens}"


def program_specs(shapes: ProgramShapes) -> list[ProgramSpec]:
    """Every program the engine can call, largest first to balance the compile threads."""
    forward = _layer_specs if shapes.config.program_scope == "layer" else _step_specs
    backend = shapes.config.attention_backend
    with backends.using(backend):
        specs = [spec for layout in shapes.layouts.values() for spec in forward(shapes, layout)]
        specs += _sampling_specs(shapes)
        specs += _page_specs(shapes)
    # Functions are traced later, in other threads.
    traced = backends.using(backend)
    return [dataclasses.replace(spec, function=traced(spec.function)) for spec in reversed(specs)]


def check_attention(shapes: ProgramShapes) -> None:
    """Raises ConfigError when the attention backend cannot run the model's shapes or pages."""
    pages, model = shapes.pages, shapes.local_model
    layout = shapes.layouts[shapes.buckets.keys()[-1]]
    q = jax.ShapeDtypeStruct((layout.key.num_tokens, model.num_heads, model.head_dim), shapes.dtype)
    rows = jax.ShapeDtypeStruct((layout.rows,), jnp.int32)
    tables = jax.ShapeDtypeStruct((layout.rows, layout.max_pages), jnp.int32)
    batch = RaggedBatch(tables, rows, rows, rows)
    backend = shapes.config.attention_backend

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


def _step_specs(shapes: ProgramShapes, layout: StepLayout) -> Iterator[ProgramSpec]:
    """The model as one program."""
    kv, tables = shapes.abstract_kv, shapes.abstract_tables
    family, model = shapes.family, shapes.local_model
    params, last_tokens = shapes.abstract_params, shapes.abstract_last_tokens
    if shapes.stages == 1:
        yield ProgramSpec(
            part_name("forward", layout.key),
            _between_layers(shapes, layout, functools.partial(step.forward, family, model, layout)),
            (params, kv, tables, last_tokens, shapes.int32(layout.size)),
            donated=(1, 2),
            outputs=(_specs(kv), _specs(tables), P(), P(None, SEQ)),
        )
        return
    carry = shapes.abstract_carry
    yield ProgramSpec(
        part_name("pipeline-step", layout.key),
        _between_layers(
            shapes, layout, functools.partial(step.pipeline_step, family, model, layout)
        ),
        (params, kv, tables, carry, last_tokens, shapes.int32(shapes.stages, layout.size)),
        donated=(1, 2, 3),
        outputs=(_specs(kv), _specs(tables), _specs(carry), P(), P(STAGE, SEQ)),
    )


def _layer_specs(shapes: ProgramShapes, layout: StepLayout) -> Iterator[ProgramSpec]:
    """The model as several programs: embed, one per kind of layer group, and final norm."""
    family, model, params = shapes.family, shapes.local_model, shapes.abstract_params
    outside = outside_layers(params)
    embed = functools.partial(step.embed, family, model, layout)
    embeds = ProgramSpec(
        part_name("embed", layout.key),
        embed,
        (
            outside,
            shapes.abstract_tables,
            shapes.abstract_last_tokens,
            shapes.int32(layout.size),
        ),
        donated=(1,),
        outputs=P(),
    )
    yield embeds
    _, x, shared, slot_mapping, sampled = jax.tree.map(
        lambda array: placed(array, shapes.sharding()), embeds.results()
    )
    alike = {layers_name(layout.key, model.layer_kinds[g]): g for g in shapes.groups(layout.key)}
    for name, group in alike.items():
        layers = functools.partial(step.layers, family, model, layout, model.layer_kinds[group])
        kv = shapes.abstract_kv[group]
        yield ProgramSpec(
            name,
            _between_layers(shapes, layout, layers),
            (params["layers"][group], kv, x, shared, slot_mapping),
            donated=(1, 2),
            outputs=(_specs(kv), P()),
        )
    final_norm = functools.partial(step.final_norm, family, model, layout)
    yield ProgramSpec(
        part_name("final-norm", layout.key), final_norm, (outside, x, sampled), outputs=P()
    )


def _between_layers(
    shapes: ProgramShapes, layout: StepLayout, function: Callable[..., Any]
) -> Callable[..., Any]:
    """`function` with sequence parallelism over `tensor`, where configured. Decode-only steps have
    few tokens and keep the all-reduce."""
    own_tokens = layout.key.rows + layout.key.prefill_tokens // shapes.seq
    if not shapes.config.sequence_parallel or not layout.key.prefill_tokens:
        return function
    if shapes.tensor == 1 or own_tokens % shapes.tensor:
        return function
    return sequence_parallel(device_rates(shapes.device))(function)


def _sampling_specs(shapes: ProgramShapes) -> Iterator[ProgramSpec]:
    family, model, int32 = shapes.family, shapes.local_model, shapes.int32
    head, last_tokens = outside_layers(shapes.abstract_params), shapes.abstract_last_tokens
    state, hidden = shapes.abstract_state, shapes.hidden(shapes.sample_rows[-1])
    for rows in shapes.sample_rows:
        yield ProgramSpec(
            sample_name("greedy", rows),
            functools.partial(step.greedy, family, model, shapes.tile),
            (head, last_tokens, hidden, int32(rows)),
            donated=(1,),
            outputs=P(),
        )
        yield ProgramSpec(
            sample_name("general", rows),
            functools.partial(step.general, family, model, shapes.tile),
            (
                head,
                last_tokens,
                state,
                hidden,
                int32(rows, NUM_FIELDS),
                shapes.masks(rows),
            ),
            donated=(1, 2),
            outputs=(P(), _specs(state), P()),
        )
    for tokens in shapes.buckets.prefill_tokens:
        yield ProgramSpec(
            prompt_logprobs_name(tokens),
            functools.partial(step.prompt_logprobs, family, model, shapes.tile),
            (
                head,
                shapes.hidden(tokens, sharded=True, staged=True),
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


def _page_specs(shapes: ProgramShapes) -> Iterator[ProgramSpec]:
    kv, int32 = shapes.abstract_kv, shapes.int32
    of_kv = _specs(kv)

    tables, stages = shapes.abstract_tables, shapes.stages
    yield ProgramSpec(
        SET_TABLES,
        functools.partial(set_tables, stages),
        (tables, int32(stages), int32(stages, shapes.max_pages)),
        donated=(0,),
        outputs=_specs(tables),
    )
    pages = int32(COPY_PAGES)
    yield ProgramSpec(COPY, copy_pages, (kv, pages, pages), donated=(0,), outputs=of_kv)
    # Single-layer programs, shared by all layers: for rare transfers, and quick to compile.
    yield from _moves(shapes, MOVE_PAGES, "-layer", kv[:1], shapes.staging(MOVE_PAGES, 1))
    if shapes.moves_pages:
        for count in MOVE_SIZES:
            yield from _moves(shapes, count, "", kv, shapes.staging(count))


def _moves(
    shapes: ProgramShapes,
    count: int,
    suffix: str,
    layers: list[KVPages],
    staging: jax.ShapeDtypeStruct,
) -> Iterator[ProgramSpec]:
    pages = shapes.int32(count)
    yield ProgramSpec(
        page_name(f"gather{suffix}", count),
        gather_pages,
        (layers, pages),
        outputs=staging.sharding.spec if shapes.mesh else None,
    )
    yield ProgramSpec(
        page_name(f"scatter{suffix}", count),
        scatter_pages,
        (layers, pages, staging),
        donated=(0,),
        outputs=_specs(layers),
    )


def _specs(arrays: Any) -> Any:
    """PartitionSpecs of placed arrays; None without a mesh."""
    return jax.tree.map(lambda array: getattr(array.sharding, "spec", None), arrays)


def outside_layers(params: Params) -> Params:
    """The parameters outside the layers: embeddings, final norm, head."""
    return {name: value for name, value in params.items() if name != "layers"}
