"""Types of the settings that have few values; `EngineConfig` says what these mean."""

from __future__ import annotations

from typing import Literal

AttentionBackend = Literal["auto", "xla", "pallas"]
DualBatchOverlap = Literal["auto", "on", "off"]
HostAttentionChoice = Literal["auto", "enabled", "disabled"]
KVCacheDtype = Literal["auto", "int8", "fp8", "fp8_e4m3", "int4"]
KVCompression = Literal["none", "shadow", "sparf"]
KVOn = Literal["device", "host"]
LoadFormat = Literal["auto", "dummy"]
Preemption = Literal["auto", "swap", "recompute"]
ProgramScope = Literal["step", "layer"]
Quantization = Literal["awq", "gptq", "compressed-tensors", "gguf", "mxfp4", "int8", "fp8", "int4"]
"""In the order in which a model that does not fit is offered them."""
SchedulerName = Literal["static", "orca", "vllm", "sarathi", "splitfuse", "medha"]
SharedPrefixAttention = Literal["auto", "enabled", "disabled"]
WeightsOn = Literal["device", "host", "disk"]
