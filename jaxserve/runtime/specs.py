"""The enumerated set of programs of one engine: names, functions, shapes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.config import EngineConfig
from jaxserve.models.config import ModelConfig
from jaxserve.models.family import Family, Params
from jaxserve.runtime import step
from jaxserve.runtime.batch import StepLayout
from jaxserve.runtime.buckets import Buckets, ProgramKey
from jaxserve.runtime.programs import ProgramSpec
from jaxserve.sampling import admit, init_state
from jaxserve.sampling.rows import NUM_FIELDS
from pallas_kernels.paged_attention import KVPages, PageLayout

MAX_PREFILL_CHUNKS = 8
"""Sequences that can prefill in one step: each costs a row of metadata and of logits."""


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Every size that shapes a program, for one resolved config and pool."""

    config: EngineConfig
    model: ModelConfig
    family: Family
    num_pages: int

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
        return {key: self._layout(key) for key in self.buckets.keys()}

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
        ):
            del config[irrelevant]
        return repr((sorted(config.items()), self.model, self.num_pages, self.max_chunks))


def forward_name(key: ProgramKey) -> str:
    return f"forward-{key.rows}-{key.prefill_tokens}"


def sample_name(kind: str, rows: int) -> str:
    return f"{kind}-{rows}"


def prompt_logprobs_name(prefill_tokens: int) -> str:
    return f"prompt-logprobs-{prefill_tokens}"


ADMIT = "admit"


def program_specs(geometry: Geometry) -> list[ProgramSpec]:
    """Every program the engine can ever call, the largest first so that threads end together."""
    model, family = geometry.model, geometry.family
    vocab_size, hidden_size = model.vocab_size, model.hidden_size
    int32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)

    def activations(tokens: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((hidden_size, tokens), geometry.dtype)

    params = abstract_params(family.param_specs(model), geometry.dtype)
    head = head_params(params)
    kv = abstract_kv(geometry)
    slots = geometry.trash_slot + 1
    last_tokens = int32((slots,))
    state = jax.eval_shape(lambda: init_state(geometry.trash_slot, vocab_size))
    specs = []
    for key, layout in geometry.layouts.items():
        function = functools.partial(step.forward, family, model, layout)
        arguments = (params, kv, last_tokens, int32((layout.size,)))
        specs.append(ProgramSpec(forward_name(key), function, arguments, donated=(1,)))
    for rows in sorted({layout.sample_rows for layout in geometry.layouts.values()}):
        specs.append(
            ProgramSpec(
                sample_name("greedy", rows),
                functools.partial(step.greedy, family, model),
                (head, last_tokens, activations(rows), int32((rows,))),
                donated=(1,),
            )
        )
        specs.append(
            ProgramSpec(
                sample_name("general", rows),
                functools.partial(step.general, family, model),
                (head, last_tokens, state, activations(rows), int32((rows, NUM_FIELDS))),
                donated=(1, 2),
            )
        )
    for tokens in geometry.buckets.prefill_tokens:
        specs.append(
            ProgramSpec(
                prompt_logprobs_name(tokens),
                functools.partial(step.prompt_logprobs, family, model),
                (head, activations(tokens), int32((tokens,))),
            )
        )
    slot_size = sum(array.size // array.shape[0] for array in jax.tree.leaves(state))
    specs.append(ProgramSpec(ADMIT, admit, (state, int32(()), int32((slot_size,))), donated=(0,)))
    return specs[::-1]


def head_params(params: Params) -> Params:
    """What the logits are made from: the parameters outside the layers."""
    return {name: value for name, value in params.items() if name != "layers"}


def abstract_params(specs: Params, dtype: jnp.dtype) -> Params:
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), specs)


def abstract_kv(geometry: Geometry) -> list[KVPages]:
    """One KVPages of shapes a layer."""
    return [geometry.pages.shapes for _ in range(geometry.model.num_layers)]


def empty_kv(geometry: Geometry) -> list[Any]:
    """A zeroed pool on the device."""
    return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), abstract_kv(geometry))
