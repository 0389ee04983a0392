"""Kernels and bytes of a decode step on an H200, counted in programs compiled for a described one.

The engine's own programs at a model's full width and batch, without weights. Two depths are
compiled, and what the deeper one has more is a layer. Needs only the compiler: JAX's CUDA plugin
(see tests/deviceless) and JAX_PLATFORMS=cpu if there is no such device. XLA's autotuner, which does
not run without a device, may choose other kernels for products; it does not change their number.

    JAX_PLATFORMS=cpu PYTHONPATH=. python benchmarks/step_anatomy.py --batch 1 8 64
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Iterable

import jax
import numpy as np
from hlo_kernels import Kernel, kernels_of
from jax.sharding import Mesh
from scale import MODELS, described
from table import print_table

from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.models.registry import get_family
from jaxserve.runtime.programs.forward.forward_programs import Forward
from jaxserve.runtime.programs.sampling_programs import SampleGeneral, SampleGreedy
from jaxserve.runtime.programs.shapes.program import ProgramShapes

MODEL = "Llama-3.1-8B"
DEPTHS = (3, 4)
BATCHES = (1, 8, 64)
CONTEXT = 2048
"""Tokens that each sequence sees, and the longest that the engine takes: all that there is room for
in arrays of partial results is written."""


@dataclasses.dataclass(frozen=True)
class Step:
    """The programs of one decode step of `batch` sequences, with so many layers of the model."""

    batch: int
    layers: int
    model: str = MODEL

    @functools.cached_property
    def shapes(self) -> ProgramShapes:
        raw = MODELS[self.model] | {"num_hidden_layers": self.layers}
        family = get_family(raw["architectures"][0])
        most = max(2, self.batch)  # A single sequence may have the program of two.
        config = EngineConfig(
            model=self.model,
            max_model_len=CONTEXT,
            max_num_seqs=most,
            max_num_batched_tokens=2048 + most,
        )
        model = family.config_from_hf(raw)
        (device,) = described("H200:1")
        config = config.resolve(model, device.platform)
        specs = family.param_specs(model)
        pages = self.batch * -(-config.max_model_len // config.page_size) + 1
        return ProgramShapes(config, model, family, specs, num_pages=pages, device=device)

    @property
    def key(self) -> ProgramKey:
        return self.shapes.buckets.pick(self.batch, 0)

    @functools.cached_property
    def forward(self) -> list[Kernel]:
        """Kernels of the model's program, in order."""
        return self._kernels(Forward(self.shapes), self.key)

    def sampler(self, kind: type[SampleGreedy] | type[SampleGeneral]) -> list[Kernel]:
        """Kernels of a sampler's program for so many sequences."""
        sampler = kind(self.shapes)
        rows = sampler.keys()
        return self._kernels(sampler, min(key for key in rows if key >= self.batch))

    @property
    def uploads(self) -> int:
        """Arrays that the host sends to the device for a step that samples greedily."""
        forward = Forward(self.shapes).uploads(self.key)
        _hidden, *slots = SampleGreedy(self.shapes).uploads(self.batch)
        return len(jax.tree.leaves((forward, slots)))

    @property
    def kv_bytes(self) -> int:
        """Keys and values that the step reads, and writes."""
        token = self.shapes.model.kv_bytes_per_token(self.shapes.dtype.itemsize)
        return self.batch * (CONTEXT + 1) * token

    @property
    def floor_bytes(self) -> int:
        """Weights and KV once: every weight but the rows of embeddings that no token has."""
        model, size = self.shapes.model, self.shapes.dtype.itemsize
        unread = (model.vocab_size - self.batch) * model.hidden_size * size
        tied = model.tie_word_embeddings
        return self.shapes.weights_bytes - (0 if tied else unread) + self.kv_bytes

    @property
    def pool_bytes(self) -> int:
        """Keys, or values, of one layer's pool."""
        return self.shapes.num_pages * self.shapes.kv.pages.page_bytes // 2

    def _kernels(self, kind, key):
        mesh = Mesh(np.array(self.shapes.devices), ("x",))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            compiled = kind.spec(key).lower().compile()
        return kernels_of(compiled.as_text(), pool_bytes=self.pool_bytes)


@dataclasses.dataclass(frozen=True)
class Anatomy:
    """What a step has at the model's whole depth, out of two shallower ones."""

    batch: int
    layer_kernels: int
    step_kernels: int
    sampling_kernels: int
    """Of the program for the most likely tokens, which `step_kernels` includes."""
    general_kernels: int
    """Of the program for all other sampling."""
    moved_bytes: int
    floor_bytes: int
    pool_copies: int
    transposes: int
    loops: int
    uploads: int

    @classmethod
    def of(cls, batch: int) -> Anatomy:
        shallow, deep = (Step(batch, layers) for layers in DEPTHS)
        whole = Step(batch, MODELS[MODEL]["num_hidden_layers"])
        greedy, general = deep.sampler(SampleGreedy), deep.sampler(SampleGeneral)

        def total(count) -> int:
            """Of the whole depth, when layers are alike."""
            first, second = count(shallow.forward), count(deep.forward)
            layer = (second - first) // (deep.layers - shallow.layers)
            return first + (whole.layers - shallow.layers) * layer

        def moved(kernels: Iterable[Kernel]) -> int:
            return sum(kernel.moved_bytes for kernel in kernels)

        every = [*deep.forward, *greedy]
        return cls(
            batch,
            (len(deep.forward) - len(shallow.forward)) // (deep.layers - shallow.layers),
            total(len) + len(greedy),
            len(greedy),
            len(general),
            total(moved) + moved(greedy) + whole.kv_bytes,
            whole.floor_bytes,
            sum(kernel.copies_pool for kernel in every),
            sum(kernel.transposes for kernel in every),
            sum(kernel.loops for kernel in [*every, *general]),
            deep.uploads,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--list", action="store_true", help="kernels of a layer, and of sampling")
    arguments = parser.parse_args()
    if arguments.list:
        for batch in arguments.batch:
            step = Step(batch, DEPTHS[0])
            some = {kind.title: step.sampler(kind) for kind in (SampleGreedy, SampleGeneral)}
            some = {"forward": step.forward} | some
            rows = [
                (title, kernel.kind, kernel.name, kernel.moved_bytes, kernel.source)
                for title, kernels in some.items()
                for kernel in kernels
            ]
            print_table(f"\nBatch {batch}", ("program", "kind", "kernel", "bytes", "of"), rows)
        return
    rows = []
    for batch in arguments.batch:
        found = Anatomy.of(batch)
        rows.append(
            (
                *(batch, found.layer_kernels, found.step_kernels),
                *(found.sampling_kernels, found.general_kernels),
                *(found.moved_bytes / 1e9, found.floor_bytes / 1e9),
                found.moved_bytes / found.floor_bytes,
                *(found.pool_copies, found.transposes, found.loops, found.uploads),
            )
        )
    print_table(
        f"A decode step of {MODEL} on an H200, {CONTEXT} tokens of context",
        (
            *("batch", "kernels a layer", "a step", "greedy", "general"),
            *("GB moved", "floor", "moved / floor"),
            *("pool copies", "transposes", "loops", "uploads"),
        ),
        rows,
    )


if __name__ == "__main__":
    main()
