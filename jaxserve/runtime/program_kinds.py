"""The enumerated set of programs of one engine, by kind."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.core.errors import ConfigError
from jaxserve.runtime.programs.adapter_programs import SetAdapter
from jaxserve.runtime.programs.compilation.executables import Programs, ProgramSpec
from jaxserve.runtime.programs.forward.forward_programs import Forward, ForwardByLayer, PipelineStep
from jaxserve.runtime.programs.host_kv.programs import ForwardWithHostKV
from jaxserve.runtime.programs.page_programs import (
    CompactAccepted,
    CopyPages,
    GatherPages,
    ScatterPages,
    SetTables,
)
from jaxserve.runtime.programs.program_kind import ProgramKind
from jaxserve.runtime.programs.prompt_programs import PromptLogprobs, SumChunks
from jaxserve.runtime.programs.sampling_programs import (
    SampleGeneral,
    SampleGreedy,
    SetSamplingState,
)
from jaxserve.runtime.programs.shapes.program import ProgramShapes
from jaxserve.runtime.programs.speculation_programs import ForceDrafts, SetHistory, Verify
from jaxserve.runtime.proposers import Proposer, proposer_of
from pallas_kernels import backends
from pallas_kernels.page_copy import copy_pages
from pallas_kernels.paged_attention import DecodeGroups, RaggedBatch, paged_attention, write_kv


class ProgramKinds:
    """Every program that an engine can call. `specs` are compiled, and `bind` makes the kinds
    callable."""

    def __init__(self, shapes: ProgramShapes) -> None:
        self.gather = GatherPages(shapes)
        self.forward: Forward | ForwardByLayer | ForwardWithHostKV
        self.host_kv: ForwardWithHostKV | None = None
        """The forward pass with KV on the host."""
        forward: tuple[ProgramKind[Any], ...]
        if shapes.config.kv_on == "host":
            self.forward = self.host_kv = ForwardWithHostKV(shapes, self.gather)
            forward = self.host_kv.kinds
        elif shapes.config.program_scope == "layer":
            self.forward = by_layer = ForwardByLayer(shapes)
            forward = by_layer.kinds
        else:
            self.forward = whole = (PipelineStep if shapes.stages > 1 else Forward)(shapes)
            forward = (whole,)
        self.greedy = SampleGreedy(shapes)
        self.general = SampleGeneral(shapes)
        self.set_sampling_state = SetSamplingState(shapes)
        self.verify = Verify(shapes)
        self.set_history = SetHistory(shapes)
        self.force_drafts = ForceDrafts(shapes)
        self.prompt_logprobs = PromptLogprobs(shapes)
        self.sum_chunks = SumChunks(shapes)
        self.set_tables = SetTables(shapes)
        self.proposer: Proposer | None = proposer_of(shapes, self.set_tables)
        self.set_adapter = SetAdapter(shapes)
        self.compact = CompactAccepted(shapes)
        self.copy = CopyPages(shapes)
        self.scatter = ScatterPages(shapes)
        self._backend = shapes.attention_backend
        self._all = (
            *forward,
            *(self.greedy, self.general, self.prompt_logprobs, self.sum_chunks),
            *(self.set_sampling_state, self.verify, self.set_history, self.force_drafts),
            *(self.proposer.kinds if self.proposer else ()),
            *(self.set_tables, self.set_adapter),
            *(self.compact, self.copy, self.gather, self.scatter),
        )

    def specs(self) -> list[ProgramSpec]:
        """Every program, the largest steps first to balance the compile threads."""
        traced = backends.using(self._backend)
        with backends.using(self._backend):
            specs = [kind.spec(key) for kind in self._all for key in reversed([*kind.keys()])]
        # Functions are traced later, in other threads, and so are those whose results they take.
        return [
            dataclasses.replace(
                spec, function=traced(spec.function), arguments=traced(spec.arguments)
            )
            for spec in specs
        ]

    def bind(self, programs: Programs) -> None:
        """Makes every kind callable. Raises ProgramMissError when a program is missing."""
        for kind in self._all:
            kind.bind(programs)


def check_attention(shapes: ProgramShapes) -> None:
    """Raises ConfigError when the attention backend cannot run the shapes or pages of the model, or
    of one that drafts for it."""
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
