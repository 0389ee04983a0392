"""Engine settings: what a user may say, and what is assumed where they say nothing."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

from jaxserve.engine.policies import POLICIES
from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig

DTYPES = ("float32", "bfloat16", "float16")


def default_dtype(platform: str) -> str:
    """The fastest dtype on a JAX platform: CPUs without bfloat16 units convert at every use."""
    return "float32" if platform == "cpu" else "bfloat16"


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine. None means: decided from the model and the device.

    Attributes:
        model: the default model's name, a .gguf file, a directory, or a Hugging Face id.
        dtype: of weights, activations and KV pages; float32 on CPUs, else bfloat16.
        quantization: how weights lie in memory: None, unpacked to `dtype`, whatever their file;
            "gguf", in the blocks of their GGUF file (Q4_0, Q4_1, Q8_0), to the last bit; "int8",
            "int4" (groups of 32) or "fp8", rounded as they load, but for embeddings and head.
        max_model_len: context limit in tokens, prompt and output; the model's own by default.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: token budget of a step.
        page_size: tokens a KV page holds, on all devices that share a sequence together.
        tensor_parallel_size: devices that each layer's heads and MLP are split over.
        pipeline_parallel_size: stages of consecutive layers, which work on as many steps at once.
        sequence_parallel_size: devices that the KV of each sequence is split over, for long ones.
        sequence_parallel_norms: between layers, each device of a tensor-parallel group has its
            share of a prefill step's tokens, and not all of them.
        devices: ids of the devices to run on (`jax.Device.id`), as many as the parallel sizes
            multiply to; on the command line separated by commas. By default the first ones.
        memory_utilization: share of a device's memory that may be used in all.
        kv_cache_memory_bytes: size of the KV pool on each device; what is left of the share by
            default, on CPUs at most 2 GiB in all.
        scheduler: one of static, orca, vllm, sarathi, splitfuse, medha.
        target_step_us: predicted time that the medha scheduler keeps a step within by the size of
            its prefill chunks; 500,000 on CPUs, else 50,000.
        priority_ageing_s: seconds of waiting that one level of priority is worth, so that no
            request waits for ever; by default levels are strict, and a request waits for as long as
            any of a better level do.
        fair_share: admit the tenant served least, instead of the request that came first.
        enable_prefix_caching: keep the KV of what was computed, for prompts that begin alike.
        host_kv_bytes: host memory for KV pages that the device has no room for; by default as much
            as the pool, at most a quarter of what is free, and none on CPUs, whose pool is itself
            in the host's memory.
        disk_kv_dir: directory for KV pages that the host's memory has no room for.
        disk_kv_bytes: how much of the disk they may take.
        preemption: what becomes of the KV of a sequence that has to give way: "swap" keeps it on a
            lower tier, "recompute" does not, "auto" takes what is faster by measured rates.
        debug_kv: check the books of all pages after every step, and poison freed pages with NaN.
        batch_invariant: compute every step in tiles of a fixed number of tokens, so that not even
            the last bit of a logprob depends on the batch; it costs time (docs/promises.md).
        seed: of everything random that no request seeds itself.
        load_format: "dummy" makes random weights of the model's config.
        attention_backend: who attends, moves pages and multiplies packed weights: "pallas", the
            device's kernels of pallas_kernels, on CPUs the TPU's, interpreted; "xla", plain XLA;
            "auto", a kernel where it can and may be trusted, else XLA, and on CPUs XLA.
        program_scope: compile the model as one program a step, or by groups of layers, which is
            ready several times sooner and costs a few more calls a step; layer on CPUs, else step.
        compilation_cache: keep compiled programs in the cache directory.
    """

    model: str | Path = "smollm2-135m-instruct"
    dtype: str | None = None
    quantization: Literal["gguf", "int8", "int4", "fp8"] | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    page_size: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    sequence_parallel_size: int = 1
    sequence_parallel_norms: bool = False
    devices: tuple[int, ...] | None = None
    memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    scheduler: str = "sarathi"
    target_step_us: int | None = None
    priority_ageing_s: float | None = None
    fair_share: bool = False
    enable_prefix_caching: bool = True
    host_kv_bytes: int | None = None
    disk_kv_dir: Path | None = None
    disk_kv_bytes: int = 0
    preemption: Literal["auto", "swap", "recompute"] = "auto"
    debug_kv: bool = False
    batch_invariant: bool = False
    seed: int = 0
    load_format: Literal["auto", "dummy"] = "auto"
    attention_backend: Literal["auto", "xla", "pallas"] = "auto"
    program_scope: Literal["step", "layer"] | None = None
    compilation_cache: bool = True

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the setting, its value and the range."""
        if not str(self.model):
            raise ConfigError("model is empty; give a name, a path or a Hugging Face id.")
        for name, choices in (
            ("dtype", (None, *DTYPES)),
            ("quantization", (None, "gguf", "int8", "int4", "fp8")),
            ("scheduler", tuple(POLICIES)),
            ("attention_backend", ("auto", "xla", "pallas")),
            ("program_scope", (None, "step", "layer")),
            ("load_format", ("auto", "dummy")),
            ("preemption", ("auto", "swap", "recompute")),
        ):
            if getattr(self, name) not in choices:
                known = ", ".join(choice for choice in choices if choice)
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be one of {known}.")
        for name, least in (
            ("max_model_len", 2),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("page_size", 1),
            ("tensor_parallel_size", 1),
            ("pipeline_parallel_size", 1),
            ("sequence_parallel_size", 1),
            ("target_step_us", 1),
            ("kv_cache_memory_bytes", 1),
            ("host_kv_bytes", 0),
            ("disk_kv_bytes", 0),
        ):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise ConfigError(f"{name} is {value!r}; it must be an integer of {least} or more.")
        for name in (
            "fair_share",
            "enable_prefix_caching",
            "debug_kv",
            "batch_invariant",
            "compilation_cache",
            "sequence_parallel_norms",
        ):
            if not isinstance(getattr(self, name), bool):
                value = getattr(self, name)
                raise ConfigError(f"{name} is {value!r}; it must be True or False.")
        if self.devices is not None:
            self._check_devices()
        if self.target_step_us is not None and self.scheduler != "medha":
            raise ConfigError(
                f"target_step_us is {self.target_step_us}, but scheduler {self.scheduler!r} keeps "
                'no step within a time; "medha" does.'
            )
        if self.batch_invariant and (
            self.sequence_parallel_size > 1 or self.sequence_parallel_norms
        ):
            raise ConfigError(
                "batch_invariant computes tokens in tiles, which sequence_parallel_size "
                f"{self.sequence_parallel_size} and sequence_parallel_norms "
                f"{self.sequence_parallel_norms} would split; use tensor_parallel_size or "
                "pipeline_parallel_size."
            )
        ageing_s = self.priority_ageing_s
        if ageing_s is not None and (
            type(ageing_s) not in (int, float) or not 1e-6 <= ageing_s < math.inf
        ):
            raise ConfigError(
                f"priority_ageing_s is {ageing_s!r}; it must be a number of seconds above 0, or "
                "None for strict levels of priority."
            )
        if not isinstance(self.disk_kv_dir, str | Path | None):
            raise ConfigError(f"disk_kv_dir is {self.disk_kv_dir!r}; it must be a directory.")
        if bool(self.disk_kv_bytes) != (self.disk_kv_dir is not None):
            raise ConfigError(
                f"disk_kv_dir is {self.disk_kv_dir!r} and disk_kv_bytes {self.disk_kv_bytes}; give "
                "both for KV pages on a disk, or neither."
            )
        if type(self.seed) is not int:
            raise ConfigError(f"seed is {self.seed!r}; it must be an integer.")
        share = self.memory_utilization
        if not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ConfigError(f"memory_utilization is {share!r}; it must be in (0, 1].")

    def _check_devices(self) -> None:
        """Makes a tuple of `devices`. Raises ConfigError for what are no ids of devices, for one
        named twice, and for another number of them than the parallel sizes take."""
        devices = self.devices
        if not isinstance(devices, list | tuple) or not all(
            type(number) is int and number >= 0 for number in devices
        ):
            raise ConfigError(f"devices is {devices!r}; it must be a list of device ids, integers.")
        twice = sorted({number for number in devices if devices.count(number) > 1})
        if twice:
            raise ConfigError(
                f"devices is {devices!r}, which names {', '.join(map(str, twice))} twice; name "
                "each device once."
            )
        if len(devices) != self.num_devices:
            raise ConfigError(
                f"devices is {devices!r}, {len(devices)} in number, but {self.sizes} take "
                f"{self.num_devices}; name as many as that, or change the sizes."
            )
        object.__setattr__(self, "devices", tuple(devices))

    @classmethod
    def of(cls, **settings: Any) -> EngineConfig:
        """A config of these settings. Raises ConfigError for a setting there is not."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(settings) - known):
            raise ConfigError(
                f"there is no setting {unknown[0]!r}; the settings are {', '.join(sorted(known))}."
            )
        return cls(**settings)

    @property
    def num_devices(self) -> int:
        """Devices of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.sequence_parallel_size

    @property
    def sizes(self) -> str:
        """The parallel sizes, for messages."""
        return (
            f"tensor_parallel_size {self.tensor_parallel_size} x pipeline_parallel_size "
            f"{self.pipeline_parallel_size} x sequence_parallel_size {self.sequence_parallel_size}"
        )

    def resolve(self, model: ModelConfig, platform: str) -> EngineConfig:
        """A copy with every None decided but the sizes of the KV pools (runtime/memory.py).

        `platform` is JAX's name of it. Raises ConfigError when the context is longer than the
        model's and the model has no way to stretch it.
        """
        on_cpu = platform == "cpu"
        own = model.max_position_embeddings
        length = self.max_model_len or own
        if length > own and model.rope.kind != "dynamic":
            raise ConfigError(
                f"max_model_len is {length}, but the model's context is {own} tokens; "
                f"set it to at most {own}."
            )
        seqs = self.max_num_seqs or (32 if on_cpu else 128)
        shares = self.sequence_parallel_size
        # A TPU's vectors are 128 lanes wide, and a page of keys is as wide as its tokens.
        page_size = self.page_size or (128 if platform == "tpu" else 64) * shares
        if page_size % shares:
            raise ConfigError(
                f"page_size is {page_size}, which {shares} devices (sequence_parallel_size) cannot "
                f"share evenly; make it a multiple of {shares}."
            )
        by_layer = self.pipeline_parallel_size == shares == 1
        if self.program_scope == "layer" and not by_layer:
            raise ConfigError(
                "program_scope is 'layer', but steps of several stages, or of devices that share "
                "sequences, are one program; leave it out, or make it 'step'."
            )
        return dataclasses.replace(
            self,
            dtype=self.dtype or default_dtype(platform),
            max_model_len=length,
            max_num_seqs=seqs,
            max_num_batched_tokens=self.max_num_batched_tokens
            or ((512 if on_cpu else 2048) + seqs),
            page_size=page_size,
            target_step_us=self.target_step_us
            or ((500_000 if on_cpu else 50_000) if self.scheduler == "medha" else None),
            program_scope=self.program_scope or ("layer" if on_cpu and by_layer else "step"),
        )
