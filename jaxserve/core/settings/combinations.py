"""Engine settings that exclude each other, and those that need another, as one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.core.errors import ConfigError

_UNUSED: dict[str, tuple[object, ...]] = {
    "acceptance": ("exact",),
    "dual_batch_overlap": ("off",),
    "preemption": ("recompute",),
    "program_scope": ("layer",),
    "scheduler": ("static", "orca", "vllm", "splitfuse"),
    "shared_prefix_attention": ("disabled",),
}
"""Values besides the default with which a setting counts as not in use."""


@dataclasses.dataclass(frozen=True)
class Exclusion:
    """`setting`, in use, does not combine with any of `others`, because of `why`.

    `instead` says what to do other than leaving one of them out.
    """

    setting: str
    others: tuple[str, ...]
    why: str
    instead: str = ""


EXCLUSIONS = (
    Exclusion(
        "layers that draft",
        ("pipeline_parallel_size",),
        "no stage has all of them",
        "use 'ngram', 'medusa', 'jacobi' or 'lookahead'",
    ),
    Exclusion(
        "trees of drafts",
        ("pipeline_parallel_size",),
        "the path that a step accepts is moved while others are in flight",
        "draft one guess of each token",
    ),
    Exclusion(
        "trees of drafts",
        ("context_parallel_size", "dual_batch_overlap"),
        "it would split a tree, which one pass of attention has to see whole",
        "draft one guess of each token",
    ),
    Exclusion(
        "acceptance",
        ("batch_invariant",),
        "its tokens depend on how many drafts a step has, and that on the batch",
        "set it to 'exact'",
    ),
    Exclusion(
        "enable_lora",
        ("sequence_parallel",),
        "its matrix products are of parts of a step's tokens",
    ),
    Exclusion(
        "weights_on",
        ("program_scope",),
        "it runs layer after layer",
    ),
    Exclusion(
        "weights_on",
        ("pipeline_parallel_size",),
        "stages would wait for each other's reads",
        "use tensor_parallel_size",
    ),
    Exclusion(
        "weights_on",
        ("layer_skip",),
        "it drafts with layers that are not on the device",
        "use 'ngram' or 'draft_model'",
    ),
    Exclusion(
        "steps_per_weight_read",
        ("scheduler", "chosen number of drafts"),
        "the time of a step that runs with others is unknown",
        "use the scheduler 'sarathi', and a number of drafts",
    ),
    Exclusion(
        "steps_per_weight_read",
        ("kv_compression",),
        "a step selects chunks of KV by itself",
    ),
    Exclusion(
        "resident_kv_tokens",
        ("kv_compression",),
        "it compresses the KV of sequences longer than the pool alone",
    ),
    Exclusion("kv_on", ("program_scope",), "it runs layer after layer"),
    Exclusion(
        "kv_on", ("speculative_config",), "drafts would write to pages that have left the device"
    ),
    Exclusion(
        "kv_on",
        ("batch_invariant",),
        "parts of the attention are merged in an order that depends on the context",
    ),
    Exclusion(
        "kv_on",
        ("sequence_parallel", "dual_batch_overlap"),
        "between the parts of a layer all devices have all tokens",
    ),
    Exclusion("kv_on", ("disk_kv_dir",), "there are no pages on disk"),
    Exclusion(
        "kv_on",
        ("preemption",),
        "a preempted sequence is computed again, because others use the host's memory",
    ),
    Exclusion(
        "kv_on",
        ("pipeline_parallel_size", "context_parallel_size"),
        "steps would wait for the host at each stage, or on each part of a page",
        "use tensor_parallel_size",
    ),
    Exclusion(
        "compressed keys",
        ("tensor_parallel_size",),
        "a basis is of all heads",
        "set kv_compression to 'sparf'",
    ),
    Exclusion(
        "kv_compression",
        ("kv_cache_dtype",),
        "quantized keys have lost what tokens are found by",
    ),
    Exclusion(
        "dual_batch_overlap",
        ("context_parallel_size", "sequence_parallel", "batch_invariant"),
        "it splits the tokens of a step into two microbatches",
    ),
    Exclusion(
        "batch_invariant",
        ("context_parallel_size", "sequence_parallel"),
        "it would split the tiles of tokens",
        "use tensor_parallel_size or pipeline_parallel_size",
    ),
    Exclusion(
        "shared_prefix_attention",
        ("batch_invariant",),
        "the order of sums would depend on which decodes share pages",
    ),
    Exclusion(
        "shared_prefix_attention",
        ("context_parallel_size", "kv_on"),
        "shared pages are read whole on one device",
    ),
    Exclusion(
        "shared_prefix_attention",
        ("dual_batch_overlap",),
        "each half of a step would read the shared pages again",
    ),
    Exclusion(
        "shared_prefix_attention",
        ("trees of drafts",),
        "the rows of a tree have masks of their own",
    ),
)


@dataclasses.dataclass(frozen=True)
class Need:
    """`setting`, in use, has no effect unless `needed` is in use or, where given, is `value`."""

    setting: str
    needed: str
    why: str
    value: object = None
    set_to: str = ""


NEEDS = (
    Need("max_loras", "enable_lora", "there are no adapters", set_to="True"),
    Need("max_lora_rank", "enable_lora", "there are no adapters", set_to="True"),
    Need(
        "resident_weight_bytes",
        "weights_on",
        "all weights are kept on the device",
        set_to="'host' or 'disk'",
    ),
    Need(
        "steps_per_weight_read",
        "weights_on",
        "no weights are read",
        set_to="'host' or 'disk'",
    ),
    Need("resident_kv_tokens", "kv_on", "all KV stays in the pool", set_to="'host'"),
    Need("host_attention", "kv_on", "all KV stays in the pool", set_to="'host'"),
    Need(
        "kv_compression",
        "kv_on",
        "it refuses the sequences longer than the pool, whose KV would be compressed",
        set_to="'host'",
    ),
    Need("shadow_rank", "kv_compression", "it is for 'shadow'", "shadow", "'shadow'"),
    Need("shadow_budget", "kv_compression", "it is for 'shadow'", "shadow", "'shadow'"),
    Need("shadow_outliers", "kv_compression", "it is for 'shadow'", "shadow", "'shadow'"),
    Need("sparf_components", "kv_compression", "it is for 'sparf'", "sparf", "'sparf'"),
    Need("sparf_budget", "kv_compression", "it is for 'sparf'", "sparf", "'sparf'"),
    Need("dual_batch_overlap", "tensor_parallel_size", "there are no sums to overlap"),
    Need("target_step_us", "scheduler", "only 'medha' has a target", value="medha"),
)


def conflict(settings: Mapping[str, Any], defaults: Mapping[str, Any], setting: str) -> str | None:
    """The first setting in use that excludes `setting`, whether or not `setting` is in use.
    Arguments are as for `check`."""
    for exclusion in EXCLUSIONS:
        if exclusion.setting == setting:
            for other in exclusion.others:
                if _in_use(settings, defaults, other):
                    return other
    return None


def check(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raises ConfigError, naming both settings, for the first pair that does not combine, and for
    the first setting without one that it needs. What has no default, a property of
    `speculative_config`, is None or False when it is not in use."""
    for rule in EXCLUSIONS:
        for other in rule.others if _in_use(settings, defaults, rule.setting) else ():
            if _in_use(settings, defaults, other):
                instead = f" {rule.instead}, or" if rule.instead else ""
                raise ConfigError(
                    f"{_named(settings, rule.setting)}, but {_named(settings, other)}, and "
                    f"{rule.why};{instead} leave one of them out."
                )
    for need in NEEDS:
        if not _in_use(settings, defaults, need.setting):
            continue
        value = settings[need.needed]
        needed = need.value
        if not (value == needed if needed else _in_use(settings, defaults, need.needed)):
            mend = f"set {need.needed} to {need.set_to}, or " if need.set_to else ""
            raise ConfigError(
                f"{_named(settings, need.setting)}, but {_named(settings, need.needed)}: "
                f"{need.why}; {mend}leave {need.setting} out."
            )


def _in_use(settings: Mapping[str, Any], defaults: Mapping[str, Any], name: str) -> bool:
    unused = (defaults[name],) if name in defaults else (None, False)
    return settings[name] not in (*unused, *_UNUSED.get(name, ()))


def _named(settings: Mapping[str, Any], name: str) -> str:
    """The setting with its value, or what of speculative_config is meant."""
    if name == "layer_skip":
        return "the method of speculative_config is 'layer_skip'"
    if name in ("layers that draft", "trees of drafts", "chosen number of drafts"):
        return f"speculative_config has {name}"
    if name == "speculative_config":
        return f"{name} is given"
    if name == "compressed keys":
        return "kv_compression is 'shadow'"
    value = settings[name]
    if name == "acceptance":
        return f"{name} of speculative_config is {value!r}"
    return f"{name} is {value!r}"
