"""Engine settings as keyword arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from jaxserve.core.settings import choices
from jaxserve.core.settings.speculative import SpeculativeConfig


class EngineSettings(TypedDict, total=False):
    """The fields of EngineConfig but for `model`, as keyword arguments that type checkers know."""

    dtype: str | None
    kv_cache_dtype: choices.KVCacheDtype
    quantization: choices.Quantization | None
    weights_on: choices.WeightsOn
    resident_weight_bytes: int | None
    steps_per_weight_read: int
    kv_on: choices.KVOn
    resident_kv_tokens: int | None
    host_attention: choices.HostAttentionChoice
    kv_compression: choices.KVCompression
    shadow_rank: int | None
    shadow_budget: int | None
    shadow_outliers: int | None
    sparf_components: int | None
    sparf_budget: int | None
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    page_size: int | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    context_parallel_size: int
    sequence_parallel: bool
    dual_batch_overlap: choices.DualBatchOverlap
    enable_expert_parallel: bool
    devices: list[int] | tuple[int, ...] | None
    memory_utilization: float
    kv_cache_memory_bytes: int | None
    scheduler: choices.SchedulerName
    target_step_us: int | None
    priority_ageing_s: float | None
    fair_share: bool
    enable_prefix_caching: bool
    host_kv_bytes: int | None
    disk_kv_dir: str | Path | None
    disk_kv_bytes: int
    preemption: choices.Preemption
    debug_kv: bool
    batch_invariant: bool
    shared_prefix_attention: choices.SharedPrefixAttention
    seed: int
    load_format: choices.LoadFormat
    attention_backend: choices.AttentionBackend
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None
    enable_lora: bool
    max_loras: int | None
    max_lora_rank: int | None
    program_scope: choices.ProgramScope | None
    compilation_cache: bool
    logits_processors: Sequence[str | Callable[..., Any]]
