"""The enumerated set of programs of one engine, by kind."""

from __future__ import annotations

import dataclasses
from typing import Any

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
