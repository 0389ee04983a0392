"""Memory and collectives of large models on many devices, by compiling for described devices.

The engine's own programs, at full size and without weights: a step of decodes and one that also
prefills. Needs only the compiler of the devices: `jax[tpu]`, or the CUDA plugin (see
tests/deviceless), and JAX_PLATFORMS=cpu if there is no such device.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import re
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from table import print_table

from jaxserve.core.devices import DeviceSpec, xla_target
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.models.partition import partition
from jaxserve.models.registry import get_family
from jaxserve.runtime.hardware.devices import collective_rates
from jaxserve.runtime.programs.forward.forward_programs import Forward, PipelineStep
from jaxserve.runtime.programs.shapes.program import ProgramShapes
from jaxserve.runtime.startup import deviceless
from sharding_rules import make_mesh

GB = 10**9
MEMORY_SHARE = 0.9
SCRATCH_BYTES = GB
"""Set aside for programs before they are compiled."""
ROWS, PREFILL_TOKENS = 64, 2048
STEPS = ("decode step", "prefill step")

deviceless.use_compilers_alone()


def _llama3(hidden: int, layers: int, heads: int, ff: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128_256,
        "hidden_size": hidden,
        "intermediate_size": ff,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "eos_token_id": [128_001, 128_008, 128_009],
    }


MODELS = {
    "Llama-3.1-8B": _llama3(4096, 32, 32, 14_336),
    "Llama-3.1-70B": _llama3(8192, 80, 64, 28_672),
}
MEMORY_BYTES = {"v5e": 16 * GB, "v6e": 32 * GB, "v5p": 95 * GB, "H200": 141 * GB}
"""As their makers say, of one device."""


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A model on a mesh: `devices` is a TPU topology, or "H200:8" for so many on one machine."""

    model: str
    devices: str
    tensor: int
    stage: int = 1
    seq: int = 1
    max_model_len: int = 131_072
    max_num_seqs: int = ROWS

    @property
    def memory_bytes(self) -> int:
        return MEMORY_BYTES[self.devices.split(":")[0]]

    @property
    def mesh(self) -> str:
        degrees = {"tensor": self.tensor, "stage": self.stage, "seq": self.seq}
        return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)

    @property
    def num_devices(self) -> int:
        return self.tensor * self.stage * self.seq

    def shapes(self) -> ProgramShapes:
        """The engine's, with a pool of what the weights leave, at most all that could be used."""
        devices = described(self.devices)
        raw = MODELS[self.model]
        family = get_family(raw["architectures"][0])
        raw = raw | {"max_position_embeddings": max(131_072, self.max_model_len)}
        config = EngineConfig(
            model=self.model,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=PREFILL_TOKENS + self.max_num_seqs,
            tensor_parallel_size=self.tensor,
            pipeline_parallel_size=self.stage,
            context_parallel_size=self.seq,
            dual_batch_overlap="off",  # As predicted: whole steps.
        )
        model = family.config_from_hf(raw)
        config = config.resolve(model, devices[0].platform)
        model = dataclasses.replace(model, max_position_embeddings=config.max_model_len)
        mesh = make_mesh(stage=self.stage, seq=self.seq, tensor=self.tensor, devices=devices)
        model, specs = partition(
            model,
            family.param_specs(model),
            tensor=self.tensor,
            stages=self.stage,
            vocab=self.tensor * self.stage,
        )
        shapes = ProgramShapes(
            config, model, family, specs, num_pages=2, device=devices[0], mesh=mesh
        )
        most = self.max_num_seqs * shapes.max_pages + 1
        room = self.budget_bytes - fixed_bytes(shapes) - SCRATCH_BYTES
        fitting = room // page_bytes(shapes)
        return dataclasses.replace(shapes, num_pages=max(2, min(most, fitting)))

    @property
    def budget_bytes(self) -> int:
        return int(MEMORY_SHARE * self.memory_bytes)


DEPLOYMENTS = [
    Deployment("Llama-3.1-8B", "v5e:4x4", tensor=8, seq=2),
    Deployment("Llama-3.1-8B", "v6e:4x4", tensor=8, seq=2),
    Deployment("Llama-3.1-8B", "v5p:4x4x4", tensor=8, seq=8),
    Deployment("Llama-3.1-8B", "H200:8", tensor=8),
    Deployment("Llama-3.1-70B", "v5e:4x4", tensor=8, stage=2, max_model_len=32_768),
    Deployment("Llama-3.1-70B", "v6e:4x4", tensor=8, stage=2),
    Deployment("Llama-3.1-70B", "v5p:4x4x4", tensor=8, stage=2, seq=4),
    Deployment("Llama-3.1-70B", "H200:8", tensor=8),
    Deployment(
        "Llama-3.1-8B",
        "v5p:4x4x4",
        tensor=8,
        seq=8,
        max_model_len=10 * 2**20,
        max_num_seqs=1,
    ),
]


def described(name: str) -> list[jax.Device]:
    """Devices that need not be there."""
    if name.startswith("H200:"):
        return topologies.get_topology_desc(
            platform="cuda",
            target_config=xla_target(DeviceSpec.of("h200")),
            topology=f"1x1x{name.split(':')[1]}",
        ).devices
    return topologies.get_topology_desc(platform="tpu", topology_name=name).devices


def fixed_bytes(shapes: ProgramShapes) -> int:
    """Bytes of one device other than its KV pool and scratch."""
    return shapes.weights_bytes + shapes.state_bytes


def page_bytes(shapes: ProgramShapes) -> int:
    """Bytes on one device of a page of all its layers."""
    return shapes.kv.pages.page_bytes * shapes.local_model.num_layers


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of a program on one device."""

    argument_bytes: int
    scratch_bytes: int
    collectives: collections.Counter[str]

    @classmethod
    def of(cls, shapes: ProgramShapes, key: ProgramKey) -> Compiled:
        kind = (PipelineStep if shapes.stages > 1 else Forward)(shapes)
        with jax.sharding.use_abstract_mesh(shapes.mesh.abstract_mesh):
            compiled = kind.spec(key).lower().compile()
        memory = compiled.memory_analysis()
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return cls(
            memory.argument_size_in_bytes,
            memory.temp_size_in_bytes + results,
            collectives(compiled.as_text()),
        )


_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("
)


def collectives(hlo: str) -> collections.Counter[str]:
    """Collectives in the text of a compiled program, by kind."""
    return collections.Counter(_COLLECTIVE.findall(hlo))


def compile_row(deployment: Deployment) -> tuple[object, ...]:
    """A row of the table: bytes of one device, and collectives of each program."""
    shapes = deployment.shapes()
    rows = deployment.max_num_seqs
    # One sequence never decodes beside its own prefill.
    mixed = ProgramKey(rows if rows > 1 else 0, PREFILL_TOKENS)
    programs = [Compiled.of(shapes, key) for key in (ProgramKey(rows, 0), mixed)]
    scratch = max(program.scratch_bytes for program in programs)
    fixed = fixed_bytes(shapes)
    pool = shapes.num_pages * page_bytes(shapes)
    fits = fixed + pool + scratch <= deployment.budget_bytes
    tokens = (shapes.num_pages - 1) * shapes.config.page_size
    return (
        deployment.model,
        deployment.devices,
        deployment.mesh,
        "yes" if fits and tokens >= deployment.max_model_len else "no",
        fixed / GB,
        pool / GB,
        scratch / GB,
        tokens,
        *(_told(program.collectives) for program in programs),
    )


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Times of one request of `context` tokens, alone in the engine, if every device did what
    its maker says: a step is as long as the longer of its arithmetic and its reading, and then
    what devices say to each other. Attention is counted causal.
    """

    shapes: ProgramShapes
    context: int

    @property
    def kv_bytes(self) -> int:
        """Of the request, on one device."""
        pages = -(-self.context // self.shapes.config.page_size)
        return pages * page_bytes(self.shapes)

    @property
    def first_token_s(self) -> float:
        starts = np.arange(0, self.context, PREFILL_TOKENS, dtype=np.float64)
        steps = self._step_s(PREFILL_TOKENS, starts)
        return float(np.sum(steps) + (self.shapes.stages - 1) * steps[-1])

    @property
    def between_tokens_s(self) -> float:
        return self.shapes.stages * float(self._step_s(1, np.float64(self.context)))

    def _step_s(self, tokens: int, cached: np.ndarray) -> np.ndarray:
        """Of `tokens` after `cached` ones, on one stage. All ranks of `seq` compute a decode."""
        shapes, model = self.shapes, self.shapes.model
        rates = collective_rates(shapes.mesh.devices.flat[0])
        size, ranks = shapes.dtype.itemsize, shapes.tensor * shapes.stages
        own = max(1, tokens // shapes.seq)
        pairs = tokens * cached + tokens * (tokens + 1) / 2
        attention = 4 * model.num_layers * model.num_heads * model.head_dim * pairs
        flops = 2 * shapes.weights_bytes / size * own + attention / (ranks * shapes.seq)
        kv_bytes = model.kv_bytes_per_token(size) * cached / (ranks * shapes.seq)
        busy = np.maximum(
            flops / rates.flops_per_s,
            (shapes.weights_bytes + kv_bytes) / rates.memory_bytes_per_s,
        )
        heads = (model.num_heads + 2 * model.num_kv_heads) // shapes.tensor
        sums = 2 * _ring_s(rates, shapes.tensor, 2 * own * model.hidden_size * size)
        # Queries go out, and results come back in float32; for decodes there is a maximum too.
        merged = _ring_s(rates, shapes.seq, tokens * heads * model.head_dim * size)
        merged += _ring_s(
            rates, shapes.seq, 4 * tokens * model.num_heads // shapes.tensor * model.head_dim
        )
        return busy + shapes.local_model.num_layers * (sums + merged)


def _ring_s(rates: Any, ranks: int, size_bytes: int) -> float:
    """To pass so many bytes on around a ring, each rank a part at a time."""
    links = 2 if rates.both_ways else 1
    hop_s = rates.hop_latency_us / 1e6
    return (ranks - 1) * (size_bytes / ranks / rates.link_bytes_per_s + hop_s) / links


def predict_row(deployment: Deployment) -> tuple[object, ...]:
    """A row of the other table: one request as long as the deployment allows."""
    predicted = Prediction(deployment.shapes(), deployment.max_model_len)
    return (
        deployment.model,
        deployment.devices,
        deployment.mesh,
        deployment.max_model_len,
        predicted.kv_bytes / GB,
        predicted.first_token_s,
        1000 * predicted.between_tokens_s,
    )


def _told(counts: collections.Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", nargs="+", help="v5e:4x4, H200:8 and so on; all by default")
    parser.add_argument("--model", default="", help="part of a model's name")
    parser.add_argument("--len", type=int, help="only deployments of this max_model_len")
    parser.add_argument("--predict", action="store_true", help="compile nothing")
    wanted = parser.parse_args()
    chosen = [
        deployment
        for deployment in DEPLOYMENTS
        if (wanted.devices is None or deployment.devices in wanted.devices)
        and wanted.model in deployment.model
        and wanted.len in (None, deployment.max_model_len)
    ]
    print_table(
        "One request of the longest context, KV in GB a device, predicted times",
        ("model", "devices", "mesh", "tokens", "KV", "first token, s", "between tokens, ms"),
        [predict_row(deployment) for deployment in chosen],
    )
    if wanted.predict:
        return
    print_table(
        "\nOne device of each mesh, GB; collectives of a program",
        ("model", "devices", "mesh", "fits", "weights", "KV", "scratch", "KV tokens", *STEPS),
        [compile_row(deployment) for deployment in chosen],
    )


if __name__ == "__main__":
    main()
