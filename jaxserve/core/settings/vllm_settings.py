"""Settings of vLLM that jaxserve names differently or does not have."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

ANSWERS: Mapping[str, str] = MappingProxyType(
    {
        "gpu_memory_utilization": "use memory_utilization",
        "block_size": "use page_size",
        "swap_space": "use host_kv_bytes, in bytes",
        "kv_offloading_size": "use host_kv_bytes, in bytes",
        "cpu_offload_gb": "use weights_on, and resident_weight_bytes for what stays on the device",
        "disable_cascade_attn": "use shared_prefix_attention",
        "decode_context_parallel_size": "use context_parallel_size",
        "enable_dbo": "use dual_batch_overlap",
        "enable_chunked_prefill": "use scheduler; sarathi, the default, chunks prefills",
        "scheduling_policy": "use priority_ageing_s or fair_share; priorities always count",
        "enforce_eager": "leave it out; programs are compiled before the first request",
        "compilation_config": "leave it out; programs are compiled before the first request",
        "max_seq_len_to_capture": "leave it out; programs are compiled before the first request",
        "async_scheduling": "leave it out; each step is dispatched before the last one is read",
        "trust_remote_code": "leave it out; code in a checkpoint is never run",
        "tokenizer": "leave it out; the tokenizer is always the model's",
        "tokenizer_mode": "leave it out; the tokenizer is always the model's",
        "task": "leave it out; an engine generates and embeds",
        "runner": "leave it out; an engine generates and embeds",
        "limit_mm_per_prompt": "leave it out; prompts are text alone",
        "num_gpu_blocks_override": "use kv_cache_memory_bytes",
        "guided_decoding_backend": "leave it out; there is one backend for structured outputs",
        "hf_token": "leave it out; the hub reads it from the environment",
        "chat_template": "leave it out; the chat template is always the model's",
        "revision": "leave it out; give the directory of the revision as model",
        "download_dir": "leave it out; give the model's directory or file as model",
        "hf_overrides": "leave it out; change config.json in a copy of the model",
        "generation_config": "leave it out; SamplingParams changes the model's own defaults",
        "override_generation_config": "leave it out; SamplingParams changes the model's defaults",
        "rope_scaling": "leave it out; change config.json in a copy of the model",
        "disable_log_stats": "leave it out; statistics are metrics, and not logged",
        "calculate_kv_scales": "leave it out; scales are those of each token as it is written",
        "data_parallel_size": "it is an option of jaxserve serve and batch, for replicas",
        "kv_transfer_config": "leave it out; replicas of jaxserve serve move KV by themselves: "
        "start them by --prefill-replicas and --decode-replicas",
        "served_model_name": "it is an option of jaxserve serve and batch",
        "reasoning_parser": "it is an option of jaxserve serve",
        "max_logprobs": "it is an option of jaxserve serve",
        "distributed_executor_backend": "leave it out; use jaxserve launch for several hosts",
        "enable_sleep_mode": "leave it out; an engine can always sleep",
        "max_cpu_loras": "leave it out; an adapter that makes room is read from its path again",
        "lora_dtype": "leave it out; adapters have the dtype of the activations",
        "fully_sharded_loras": "leave it out; adapters are split as the weights beside them are",
    }
)
"""What to do instead, by vLLM's name."""

_TOOL_CALLS = "leave it out; calls are parsed in the format of the chat template"
SERVER_ANSWERS: Mapping[str, str] = MappingProxyType(
    {
        "enable_log_requests": "use log_requests",
        "disable_log_requests": "leave it out; only log_requests logs them",
        "uvicorn_log_level": "use log_level",
        "disable_uvicorn_access_log": "leave it out; only log_requests logs them",
        "enable_server_load_tracking": "leave it out; GET /load always answers",
        "enable_prompt_tokens_details": "leave it out; usage always has the cached tokens",
        "enable_ssl_refresh": "leave it out; restart the server for another certificate",
        "api_server_count": "leave it out; one process serves HTTP",
        "ssl_cert_reqs": "leave it out; with ssl_ca_certs, certificates are always required",
        "enable_auto_tool_choice": _TOOL_CALLS,
        "tool_call_parser": _TOOL_CALLS,
    }
)
"""The same for flags of vLLM's server, which are no settings of an engine."""


def answer_to(name: str, answers: Mapping[str, str] = ANSWERS) -> str | None:
    """The error message for a setting of vLLM by another name than ours; None for other names."""
    answer = answers.get(name)
    return None if answer is None else f"{name} is a setting of vLLM, not of jaxserve: {answer}."
