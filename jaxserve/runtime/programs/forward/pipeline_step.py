"""A step in a pipeline, whose stages each work on another one.

The model is one program, `pipeline_step`, or the three kinds `enter_stage`, `stage_layers` and
`leave_stage`; each is what step.py has for a model that is whole, between its neighbours.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.core.model_config import LayerKind, ModelConfig
from jaxserve.kv.layout import KVPlace
from jaxserve.models import parallel
from jaxserve.models.family import Family, Params
from jaxserve.runtime.programs.forward.step import TokenInputs, embed, for_sampling, layers, normed
from jaxserve.runtime.programs.layout.step_inputs import SlotMapping
from jaxserve.runtime.programs.layout.step_layout import StepLayout
from jaxserve.sampling.speculation import SpeculationState
from pallas_kernels.paged_attention import Pages
from sharding_rules import STAGE


def pipeline_step(
    family: Family,
    config: ModelConfig,
    layout: StepLayout,
    params: Params,
    kv: list[Pages],
    tables: jax.Array,
    carry: tuple[jax.Array, jax.Array],
    last_tokens: jax.Array,
    speculation: SpeculationState | None,
    metadata: jax.Array,
) -> tuple[
    list[Pages],
    jax.Array,
    tuple[jax.Array, jax.Array],
    jax.Array,
    jax.Array,
    list[jax.Array],
    jax.Array | None,
]:
    """One pipeline stage's part of a dispatch, with one step in flight per stage.

    Stage s holds its slice of the stacked `params["layers"]` and runs the step that `metadata[s]`
    describes; the first stage runs the newest. Its `tables` are as planned for that step. `carry`
    holds the activations from the previous stage, of decodes and of prefill tokens.

    Returns what `forward` does, for the oldest step, and the carry for the next stage; nothing is
    kept. Hidden states of prefill tokens are valid on the last stage only.
    """
    tables, x, shared, slot_mappings, sampled = enter_stage(
        family, config, layout, params, tables, carry, last_tokens, speculation, metadata
    )
    kinds, places, stacked = config.layer_kinds, layout.kv.places, params["layers"]
    kv, x, kept, loads = stage_layers(
        family, config, layout, kinds, places, stacked, kv, x, shared, slot_mappings
    )
    return kv, tables, *leave_stage(family, config, layout, params, carry, x, sampled), kept, loads


def enter_stage(
    family: Family,
    config: ModelConfig,
    layout: StepLayout,
    params: Params,
    tables: jax.Array,
    carry: tuple[jax.Array, jax.Array],
    last_tokens: jax.Array,
    speculation: SpeculationState | None,
    metadata: jax.Array,
) -> tuple[jax.Array, jax.Array, TokenInputs, tuple[SlotMapping, ...], jax.Array]:
    """First part of `pipeline_step`, as `embed`: the activations are embeddings on the first stage,
    else the previous stage's; the sampled tokens are those of the oldest step. A sequence is in one
    step at most, so that `speculation` has its length and drafts until that step has left."""
    stages, stage = lax.axis_size(STAGE), lax.axis_index(STAGE)
    tokens = layout.key.prefill_tokens // layout.seq
    embed_step = functools.partial(
        embed, family, config, layout, params, tables, last_tokens, speculation
    )
    _, newest, *_ = embed_step(metadata[0])
    _, oldest = layout.unpack(tables, metadata[stages - 1])
    tables, _, shared, slot_mappings, _ = embed_step(metadata[stage])
    handed = jnp.concatenate([_of_decodes(layout, carry[0]), carry[1][:tokens]])
    handed = jnp.pad(handed, ((0, len(newest) - len(handed)), (0, 0)))
    x = jnp.where(stage == 0, newest, handed)
    return tables, x, shared, slot_mappings, oldest.sampled


def stage_layers(
    family: Family,
    config: ModelConfig,
    layout: StepLayout,
    kinds: Sequence[LayerKind],
    places: Sequence[KVPlace],
    params: Sequence[Params],
    *arrays: Any,
) -> tuple[list[Pages], jax.Array, list[jax.Array], jax.Array | None]:
    """Middle part of `pipeline_step`: `layers` with this stage's slice of the stacked `params`, and
    the tokens of the experts of all stages, each of its own step."""
    own = jax.tree.map(lambda array: array[0], params)
    kv, x, kept, loads = layers(family, config, layout, kinds, places, own, *arrays)
    if loads is not None:
        loads = lax.all_gather(loads, STAGE, tiled=True)
    return kv, x, kept, loads


def leave_stage(
    family: Family,
    config: ModelConfig,
    layout: StepLayout,
    params: Params,
    carry: tuple[jax.Array, jax.Array],
    x: jax.Array,
    sampled: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array, jax.Array]:
    """Last part of `pipeline_step`: the carry for the next stage, and as `final_norm`."""
    stages, decodes = lax.axis_size(STAGE), layout.key.decode_tokens
    tokens = layout.key.prefill_tokens // layout.seq
    picked, of_prefill = normed(family, config, layout, params, x, sampled)
    x = lax.ppermute(x, STAGE, [(s, s + 1) for s in range(stages - 1)])
    carry = (
        _with_decodes(layout, carry[0], x[:decodes]),
        carry[1].at[:tokens].set(x[decodes : decodes + tokens]),
    )
    return carry, for_sampling(layout, parallel.of_last_stage(picked)), of_prefill


def _of_decodes(layout: StepLayout, carry: jax.Array) -> jax.Array:
    """The activations [decode tokens, hidden] of this program's decodes in a carry [most rows *
    most tokens of a row, hidden], which has those of a row at the same place for every width."""
    rows, width, hidden = layout.key.rows, layout.key.width, carry.shape[-1]
    return carry.reshape(-1, layout.max_width, hidden)[:rows, :width].reshape(-1, hidden)


def _with_decodes(layout: StepLayout, carry: jax.Array, x: jax.Array) -> jax.Array:
    """The carry with activations [decode tokens, hidden] of this program's decodes."""
    rows, width, hidden = layout.key.rows, layout.key.width, carry.shape[-1]
    by_row = carry.reshape(-1, layout.max_width, hidden)
    return by_row.at[:rows, :width].set(x.reshape(rows, width, hidden)).reshape(carry.shape)
