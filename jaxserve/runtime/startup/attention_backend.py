"""Whether the attention backend that the user asks for can run an engine's programs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxserve.core.errors import ConfigError
from jaxserve.runtime.programs.shapes.program import ProgramShapes
from pallas_kernels import backends
from pallas_kernels.page_copy import copy_pages
from pallas_kernels.paged_attention import DecodeGroups, RaggedBatch, paged_attention, write_kv


def check_attention_backend(shapes: ProgramShapes) -> None:
    """Raises ConfigError for an explicit backend without support; "auto" only warns."""
    if shapes.config.attention_backend == "pallas":
        if shapes.attention_backend != "pallas":
            raise ConfigError(
                "attention_backend is 'pallas', but no kernel attends along the paths of trees of "
                "drafts with batch_invariant=True; leave attention_backend out, or draft one guess "
                "of each token."
            )
        _check_kernels(shapes)


def _check_kernels(shapes: ProgramShapes) -> None:
    """Raises ConfigError when the kernels cannot run the shapes or pages of the model, or of one
    that drafts for it."""
    layout, backend = shapes.layouts[shapes.buckets.keys()[-1]], shapes.config.attention_backend
    num_rows = layout.key.decode_tokens + layout.chunks
    rows = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    tables = jax.ShapeDtypeStruct((num_rows, layout.max_pages), jnp.int32)
    batch = RaggedBatch(tables, rows, rows, rows)
    room = jax.ShapeDtypeStruct((layout.num_decode_groups,), jnp.int32)
    groups = DecodeGroups(room, room, room) if layout.num_decode_groups else None
    models = [(shapes.local_model, "")]
    if shapes.local_draft_model is not None:
        models.append((shapes.local_draft_model, "the model of speculative_config: "))
    pools = [shapes.kv.pages_of(model).shapes for model, _ in models]

    def all_of_it(model, q, pages, batch, groups):
        attended = paged_attention(
            q,
            pages,
            batch,
            num_decodes=layout.key.decode_tokens,
            scale=model.attention_scale,
            soft_cap=model.attention_soft_cap,
            groups=groups,
        )
        new, places = q[:, : model.num_kv_heads], jnp.zeros(len(q), jnp.int32)
        return attended, write_kv(pages, new, new, places, places)

    for count, ((model, whose), pages) in enumerate(zip(models, pools), 1):
        shape = layout.key.num_tokens, model.num_heads, model.head_dim
        q = jax.ShapeDtypeStruct(shape, shapes.dtype)
        try:
            with backends.using(backend):
                jax.eval_shape(functools.partial(all_of_it, model), q, pages, batch, groups)
                jax.eval_shape(copy_pages, pools[:count], batch.starts, batch.starts)
        except ValueError as error:
            raise ConfigError(f"attention_backend is {backend!r}. {whose}{error}") from error
