"""Engine settings and their defaults."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jaxserve.core.arithmetic import cdiv
from jaxserve.core.dtypes import DTYPES, default_dtype, full_dtype
from jaxserve.core.errors import ConfigError
from jaxserve.core.model_config import ModelConfig
from jaxserve.core.requests.lora import DEFAULT_MAX_LORA_RANK, DEFAULT_MAX_LORAS
from jaxserve.core.settings import choices, combinations
from jaxserve.core.settings.speculative import SpeculativeConfig
from jaxserve.core.settings.vllm_settings import answer_to

SHADOW_DEFAULTS = {"shadow_rank": 160, "shadow_budget": 2048, "shadow_outliers": 48}
"""Those of ShadowKV's paper (2410.21465)."""
_SPARF_SHARE = 8
"""InstInfer's (2409.04992): an eighth of the features, and of the tokens."""
_OF_NO_PROGRAM = {"of_programs": False}
"""Marks a setting that changes no program, or only by the number of KV pages."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine. None means: chosen from the model and the device.

    Attributes:
        model: the default model's name, a .gguf file, a directory, or a Hugging Face id.
        dtype: dtype of weights, activations and KV pages: float32, bfloat16 (bf16) or float16
            (fp16); by default float32 on CPUs, else bfloat16.
        kv_cache_dtype: dtype of KV pages: "auto" is that of activations; with "int8", "fp8"
            (fp8_e4m3) or "int4" they are quantized as they are written, with a scale for each token
            and head (docs/kv.md).
        quantization: format of the weights in memory: "awq", "gptq", "fp8", "mxfp4" or
            "compressed-tensors", as a checkpoint of this quantization_config stores them, which is
            the default for one (docs/models.md); "gguf", bit-exact in the blocks of
            the GGUF file (docs/kernels.md), or "mxfp4" in those of its MXFP4 experts alone;
            "int8", "int4" (groups of 32) or "fp8", quantized on loading, except embeddings and
            head. By default other files are dequantized to `dtype`.
        weights_on: where the layers are: "device"; or "host" (its memory) or "disk", from where
            every step reads them, with two at a time in device memory, so that a model may be
            larger than the device (docs/offload.md).
        resident_weight_bytes: memory on each device for weights with `weights_on` host or disk:
            embeddings and head, two layers that are being read, and as many layers to keep there
            as fit; by default none are kept.
        steps_per_weight_read: steps that pass through the layers together with `weights_on` host or
            disk, each layer computing all of them before the next one is read; up to so many of
            these share the running sequences (docs/offload.md).
        kv_on: where the KV of sequences longer than the pool is: with "device" they are refused;
            with "host" their older pages are in host memory, from where every step reads them, a
            few at a time (docs/offload.md).
        resident_kv_tokens: with `kv_on` host, tokens of each sequence whose KV stays in the pool,
            the newest; by default all of a sequence that fits the pool, and of a longer one as many
            as a third of the pool holds.
        host_attention: with `kv_on` host, where the attention to pages on the host is computed:
            "enabled": on the host, to which queries are copied; "disabled": on the device, to which
            the pages are; "auto": for each size of a step, the faster by measured rates
            (docs/offload.md).
        kv_compression: with `kv_on` host, decodes of these sequences attend to some of the older
            tokens: "shadow": in chunks, found by keys of a low rank on the device, of which only
            the values are read from the host; "sparf": found by a few features of all keys, on the
            host, which computes their attention. Answers differ from those of "none"
            (docs/offload.md).
        shadow_rank: rank of the compressed keys of a layer, all heads together; at most the size of
            its keys; 160 by default with `kv_compression` shadow.
        shadow_budget: tokens of the older pages that a decode attends to, for each KV head, in
            chunks of eight; 2,048 by default.
        shadow_outliers: chunks of a sequence that are kept exactly on the device; 48 by default.
        sparf_components: features of keys by which tokens are found with `kv_compression` sparf, of
            each KV head; an eighth of them by default.
        sparf_budget: tokens of the older pages that a decode attends to, for each KV head; an
            eighth of `max_model_len` by default.
        max_model_len: context limit in tokens, prompt and output; by default the model's.
        max_num_seqs: maximum number of running sequences.
        max_num_batched_tokens: token budget of a step.
        page_size: tokens per KV page, summed over the devices that share a sequence.
        tensor_parallel_size: devices that each layer's heads and MLP are split over.
        pipeline_parallel_size: stages of consecutive layers, with one step in flight per stage.
        context_parallel_size: devices that the KV of each sequence is split over (long contexts).
        sequence_parallel: between layers, each device of a tensor-parallel group holds a
            share of a prefill step's tokens instead of all of them.
        dual_batch_overlap: compute a step of a tensor-parallel mesh as two halves, so that one half
            computes while the other's results are summed over the devices: "auto" where that is
            predicted to be faster (docs/parallel.md), "on" in every step, "off" in none.
        enable_expert_parallel: in a mixture of experts, each device of a stage holds some of the
            experts, instead of a part of every expert (docs/parallel.md).
        devices: ids of the devices to run on (`jax.Device.id`), as many as the product of the
            parallel sizes; comma-separated on the command line. By default the first ones.
        memory_utilization: share of a device's memory that may be used in total.
        kv_cache_memory_bytes: size of the KV pool on each device; by default what is left of
            memory_utilization, on CPUs at most 2 GiB in total.
        scheduler: how steps are filled: sarathi splits prompts into chunks beside decodes, vllm
            runs whole prompts first; the others are for comparison (docs/architecture.md).
        target_step_us: predicted step time that the medha scheduler targets by the size of its
            prefill chunks; 500,000 on CPUs, else 50,000.
        priority_ageing_s: seconds of waiting that equal one priority level, so that no request
            starves; by default levels are strict, and a request waits for as long as any request
            of a better level does.
        fair_share: admit requests of the tenant served least first, instead of the oldest.
        enable_prefix_caching: cache computed KV for prompts with a common prefix.
        host_kv_bytes: host memory for KV pages evicted from the device; by default the size of the
            pool, at most a quarter of free memory, and none on CPUs, whose pool is in host memory
            already. With `kv_on` host it is for the older pages of sequences longer than the pool
            instead; by default as much as one of max_model_len needs, at most a quarter of free
            memory.
        disk_kv_dir: directory for KV pages evicted from host memory.
        disk_kv_bytes: disk space for these pages.
        preemption: KV of a preempted sequence: "swap" offloads it to a lower tier, "recompute"
            drops it, "auto" chooses the faster by measured rates.
        debug_kv: check the consistency of all pages after every step, fill freed pages with NaN.
        batch_invariant: compute every step in tiles of a fixed number of tokens, so that logprobs
            do not depend on the batch, bit for bit; it costs time (docs/promises.md).
        shared_prefix_attention: "enabled": decodes that share their first pages read them once a
            group, where that pays; "auto": on CPUs, without the settings with which it does not
            combine (docs/parallel.md).
        seed: seed for requests without one of their own.
        load_format: "dummy" makes random weights of the model's config.
        attention_backend: implementation of attention, page copies and matmuls with quantized
            weights: "pallas", the device's kernels of pallas_kernels, on CPUs those of TPUs,
            interpreted; "xla", plain XLA; "auto", a kernel where it is supported and known to be
            correct, else XLA, and on CPUs XLA.
        speculative_config: how to draft tokens that one step then verifies, with vLLM's keys:
            num_speculative_tokens (a number or "auto"), method ("ngram", "draft_model",
            "layer_skip", "medusa", "eagle", "eagle3", "mtp", "jacobi" or "lookahead") and the
            method's own keys (docs/speculation.md); a JSON object on the command line. By
            default a step makes one token.
        enable_lora: serve LoRA adapters beside the model (docs/lora.md).
        max_loras: adapters that are held on the devices at once, which every step multiplies with;
            4 by default with `enable_lora`.
        max_lora_rank: the highest rank of an adapter; 16 by default with `enable_lora`.
        program_scope: compile the model as one program per step, or per group of layers, which
            compiles several times faster and costs a few more calls per step; layer on CPUs, else
            step.
        compilation_cache: store compiled programs in the cache directory.
        logits_processors: functions that change a row's logits before it is sampled, or
            `module:function`; a request names those to apply (docs/serving.md).
    """

    model: str | Path = field(default="smollm2-135m-instruct", metadata=_OF_NO_PROGRAM)
    dtype: str | None = None
    kv_cache_dtype: choices.KVCacheDtype = "auto"
    quantization: choices.Quantization | None = None
    weights_on: choices.WeightsOn = "device"
    resident_weight_bytes: int | None = None
    steps_per_weight_read: int = 1
    kv_on: choices.KVOn = "device"
    resident_kv_tokens: int | None = None
    host_attention: choices.HostAttentionChoice = "auto"
    kv_compression: choices.KVCompression = "none"
    shadow_rank: int | None = None
    shadow_budget: int | None = None
    shadow_outliers: int | None = None
    sparf_components: int | None = None
    sparf_budget: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    page_size: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    sequence_parallel: bool = False
    dual_batch_overlap: choices.DualBatchOverlap = "auto"
    enable_expert_parallel: bool = False
    devices: tuple[int, ...] | None = field(default=None, metadata=_OF_NO_PROGRAM)
    memory_utilization: float = field(default=0.9, metadata=_OF_NO_PROGRAM)
    kv_cache_memory_bytes: int | None = field(default=None, metadata=_OF_NO_PROGRAM)
    scheduler: choices.SchedulerName = field(default="sarathi", metadata=_OF_NO_PROGRAM)
    target_step_us: int | None = field(default=None, metadata=_OF_NO_PROGRAM)
    priority_ageing_s: float | None = field(default=None, metadata=_OF_NO_PROGRAM)
    fair_share: bool = field(default=False, metadata=_OF_NO_PROGRAM)
    enable_prefix_caching: bool = field(default=True, metadata=_OF_NO_PROGRAM)
    host_kv_bytes: int | None = field(default=None, metadata=_OF_NO_PROGRAM)
    disk_kv_dir: Path | None = field(default=None, metadata=_OF_NO_PROGRAM)
    disk_kv_bytes: int = field(default=0, metadata=_OF_NO_PROGRAM)
    preemption: choices.Preemption = field(default="auto", metadata=_OF_NO_PROGRAM)
    debug_kv: bool = field(default=False, metadata=_OF_NO_PROGRAM)
    batch_invariant: bool = False
    shared_prefix_attention: choices.SharedPrefixAttention = "auto"
    seed: int = field(default=0, metadata=_OF_NO_PROGRAM)
    load_format: choices.LoadFormat = field(default="auto", metadata=_OF_NO_PROGRAM)
    attention_backend: choices.AttentionBackend = "auto"
    speculative_config: SpeculativeConfig | None = None
    enable_lora: bool = False
    max_loras: int | None = None
    max_lora_rank: int | None = None
    program_scope: choices.ProgramScope | None = None
    compilation_cache: bool = field(default=True, metadata=_OF_NO_PROGRAM)
    logits_processors: tuple[str | Callable[..., Any], ...] = ()

    def __post_init__(self) -> None:
        """Converts other names of a dtype. Raises ConfigError, naming the setting, its value and
        the range."""
        if not isinstance(self.model, str | os.PathLike | None) or not str(self.model):
            raise ConfigError(f"model is {self.model!r}; give a name, a path or a Hugging Face id.")
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", full_dtype(self.dtype))
        if self.kv_cache_dtype == "fp8_e4m3":
            object.__setattr__(self, "kv_cache_dtype", "fp8")
        for name, allowed in _choices().items():
            value = getattr(self, name)
            if not any(value == choice and type(value) is type(choice) for choice in allowed):
                known = ", ".join(str(choice) for choice in allowed if choice is not None)
                raise ConfigError(f"{name} is {value!r}; it must be one of {known}.")
        for name, least in (
            ("max_model_len", 2),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("page_size", 1),
            ("tensor_parallel_size", 1),
            ("pipeline_parallel_size", 1),
            ("context_parallel_size", 1),
            ("target_step_us", 1),
            ("kv_cache_memory_bytes", 1),
            ("resident_weight_bytes", 1),
            ("steps_per_weight_read", 1),
            ("host_kv_bytes", 0),
            ("resident_kv_tokens", 1),
            ("shadow_rank", 1),
            ("shadow_budget", 8),
            ("shadow_outliers", 0),
            ("sparf_components", 1),
            ("sparf_budget", 1),
            ("disk_kv_bytes", 0),
            ("max_loras", 1),
            ("max_lora_rank", 1),
        ):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                of_bytes = ", in bytes, such as 2 * 2**30" if name.endswith("_bytes") else ""
                raise ConfigError(
                    f"{name} is {value!r}; it must be an integer of {least} or more{of_bytes}."
                )
        if self.devices is not None:
            self._check_devices()
        given = self.logits_processors
        if not isinstance(given, list | tuple) or not all(
            callable(each) or isinstance(each, str) for each in given
        ):
            raise ConfigError(
                f"logits_processors is {given!r:.200}; it must be a list of functions, or of "
                "'module:function'."
            )
        object.__setattr__(self, "logits_processors", tuple(given))
        if self.speculative_config is not None:
            speculative = SpeculativeConfig.of(self.speculative_config)
            object.__setattr__(self, "speculative_config", speculative)
        ageing_s = self.priority_ageing_s
        if ageing_s is not None and (
            type(ageing_s) not in (int, float) or not 1e-6 <= ageing_s < math.inf
        ):
            raise ConfigError(
                f"priority_ageing_s is {ageing_s!r}; it must be a number of seconds above 0, or "
                "None for strict priority levels."
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
        combinations.check(self._combined(), _DEFAULTS)

    def _check_devices(self) -> None:
        """Converts `devices` to a tuple. Raises ConfigError for invalid or duplicate device ids,
        and if several are not as many as the parallel sizes make."""
        devices = self.devices
        if not isinstance(devices, list | tuple) or not all(
            type(number) is int and number >= 0 for number in devices
        ):
            raise ConfigError(f"devices is {devices!r}; it must be a list of device ids, integers.")
        twice = sorted({number for number in devices if devices.count(number) > 1})
        if twice:
            raise ConfigError(
                f"devices is {devices!r}, which lists {', '.join(map(str, twice))} twice; list "
                "each device once."
            )
        object.__setattr__(self, "devices", tuple(devices))
        if len(devices) != 1:  # Of target devices it is their number.
            self.check_device_ids()

    def check_device_ids(self) -> None:
        """Raises ConfigError if `devices` are not as many as the parallel sizes make."""
        devices = self.devices
        if devices is not None and len(devices) != self.num_devices:
            raise ConfigError(
                f"devices is {list(devices)!r}, which has {len(devices)} entries, but {self.sizes} "
                f"need {self.num_devices}; list as many ids, or leave it out."
            )

    @classmethod
    def of(cls, **settings: Any) -> EngineConfig:
        """A config of these settings. Raises ConfigError for an unknown setting."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in sorted(set(settings) - known):
            if answer := answer_to(name):
                raise ConfigError(answer)
            if alike := difflib.get_close_matches(name, known, n=1):
                raise ConfigError(f"unknown setting {name!r}; did you mean {alike[0]}?")
            raise ConfigError(
                f"unknown setting {name!r}; the settings are {', '.join(sorted(known))}."
            )
        return cls(**settings)

    @property
    def num_devices(self) -> int:
        """Number of devices of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    def _shadow(self, name: str) -> int | None:
        """A setting of compressed KV, or its default; None without compression."""
        given = getattr(self, name)
        default = SHADOW_DEFAULTS[name] if self.kv_compression == "shadow" else None
        return default if given is None else given

    @property
    def sizes(self) -> str:
        """The parallel sizes, for messages."""
        return (
            f"tensor_parallel_size {self.tensor_parallel_size} x pipeline_parallel_size "
            f"{self.pipeline_parallel_size} x context_parallel_size {self.context_parallel_size}"
        )

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """Numbers of drafts that a decode may have, ascending; only 0 without speculation."""
        return self.speculative_config.lengths if self.speculative_config else (0,)

    @property
    def num_speculative_tokens(self) -> int:
        """Most drafts of a decode; 0 without speculation."""
        return self.draft_lengths[-1]

    @property
    def max_step_seqs(self) -> int:
        """Most sequences that decode in one step: with several steps to a read of the weights, each
        has its share of the running ones."""
        return share_of_step(self.max_num_seqs, self.steps_per_weight_read)

    def _combined(self) -> dict[str, Any]:
        """The settings that `combinations` has rules for."""
        speculative = self.speculative_config
        return vars(self) | {
            "acceptance": speculative and speculative.acceptance,
            "layer_skip": speculative is not None and speculative.method == "layer_skip",
            "layers that draft": speculative is not None and speculative.has_layers,
            "chosen number of drafts": len(self.draft_lengths) > 2,
            "compressed keys": self.kv_compression == "shadow",
            "trees of drafts": speculative is not None and bool(speculative.tree_depth),
        }

    def of_programs(self) -> dict[str, Any]:
        """The settings that determine programs, those of no program left out. Of the devices, which
        they run on, programs are stored separately."""
        return {
            setting.name: getattr(self, setting.name)
            for setting in dataclasses.fields(EngineConfig)  # Not as a subclass redefines them.
            if setting.metadata.get("of_programs", True)
        }

    def resolve(self, model: ModelConfig, platform: str) -> EngineConfig:
        """A copy with every None resolved but the sizes of KV pools (runtime/planning/memory.py).

        `platform` is JAX's platform name. Raises ConfigError when the context is longer than the
        model's and the model cannot extend it, or when a decode with its drafts is longer.
        """
        on_cpu = platform == "cpu"
        own = model.max_position_embeddings
        length = self.max_model_len or own
        if length > own and model.rope.kind != "dynamic":
            raise ConfigError(
                f"max_model_len is {length}, but the model's context is {own} tokens; "
                f"set it to at most {own}."
            )
        if self.num_speculative_tokens >= length:
            raise ConfigError(
                f"num_speculative_tokens of speculative_config is "
                f"{self.speculative_config.num_speculative_tokens!r}, so that a step computes up "
                f"to {1 + self.num_speculative_tokens} tokens of a sequence, but the context is "
                f"{length}; draft at most {length - 1}, or set max_model_len to more than "
                f"{self.num_speculative_tokens}."
            )
        seqs = self.max_num_seqs or (32 if on_cpu else 128)
        shares = self.context_parallel_size
        # TPU vectors are 128 lanes wide, and a page of keys is as wide as its tokens.
        page_size = self.page_size or (128 if platform == "tpu" else 64) * shares
        if page_size % shares:
            raise ConfigError(
                f"page_size is {page_size}, which is not divisible by context_parallel_size "
                f"{shares}; set it to a multiple of {shares}."
            )
        step_seqs = share_of_step(seqs, self.steps_per_weight_read)
        by_sparf = self.kv_compression == "sparf"
        streamed = self.weights_on != "device" or self.kv_on != "device"
        shares_prefixes = self.shared_prefix_attention
        if shares_prefixes == "auto":
            excluded = combinations.conflict(self._combined(), _DEFAULTS, "shared_prefix_attention")
            shares_prefixes = "enabled" if on_cpu and not excluded else "disabled"
        return dataclasses.replace(
            self,
            dtype=self.dtype or default_dtype(platform),
            max_model_len=length,
            max_num_seqs=seqs,
            max_num_batched_tokens=self.max_num_batched_tokens
            or ((512 if on_cpu else 2048) + step_seqs * (1 + self.num_speculative_tokens)),
            page_size=page_size,
            shared_prefix_attention=shares_prefixes,
            target_step_us=self.target_step_us
            or ((500_000 if on_cpu else 50_000) if self.scheduler == "medha" else None),
            **{name: self._shadow(name) for name in SHADOW_DEFAULTS},
            sparf_components=self.sparf_components
            or (max(1, model.head_dim // _SPARF_SHARE) if by_sparf else None),
            sparf_budget=self.sparf_budget or (cdiv(length, _SPARF_SHARE) if by_sparf else None),
            max_loras=self.max_loras or (DEFAULT_MAX_LORAS if self.enable_lora else None),
            max_lora_rank=self.max_lora_rank
            or (DEFAULT_MAX_LORA_RANK if self.enable_lora else None),
            program_scope=self.program_scope or ("layer" if on_cpu or streamed else "step"),
        )


_DEFAULTS = {setting.name: setting.default for setting in dataclasses.fields(EngineConfig)}


def share_of_step(max_num_seqs: int, steps_per_weight_read: int) -> int:
    """Most sequences that decode in one step, of the running ones."""
    return cdiv(max_num_seqs, steps_per_weight_read)


@functools.cache
def _choices() -> dict[str, tuple[object, ...]]:
    """The values of the settings that have few: those of their Literal types, True and False."""
    found: dict[str, tuple[object, ...]] = {"dtype": (None, *DTYPES)}
    for name, hint in get_type_hints(EngineConfig).items():
        kinds = (hint, *get_args(hint))
        literals = [
            choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)
        ]
        if literals:
            found[name] = (*literals, None) if type(None) in kinds else tuple(literals)
        elif hint is bool:
            found[name] = (True, False)
    return found
