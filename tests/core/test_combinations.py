"""Each row of the table of settings that exclude or need each other is refused with its reason."""

import dataclasses

import pytest

from jaxserve.core.errors import ConfigError
from jaxserve.core.settings.combinations import EXCLUSIONS, NEEDS
from jaxserve.core.settings.config import EngineConfig

TREE = {"method": "medusa", "model": "heads", "speculative_token_tree": "[2, 1]"}
IN_USE = {
    "acceptance": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 2,
            "acceptance": "typical",
        }
    },
    "compressed keys": {"kv_compression": "shadow", "kv_on": "host"},
    "disk_kv_dir": {"disk_kv_dir": "pages", "disk_kv_bytes": 1 << 20},
    "dual_batch_overlap": {"dual_batch_overlap": "on", "tensor_parallel_size": 2},
    "host_attention": {"host_attention": "enabled", "kv_on": "host"},
    "kv_cache_dtype": {"kv_cache_dtype": "int8"},
    "kv_compression": {"kv_compression": "shadow", "kv_on": "host"},
    "kv_on": {"kv_on": "host"},
    "layer_skip": {
        "speculative_config": {
            "method": "layer_skip",
            "num_layers": 1,
            "num_speculative_tokens": 2,
        }
    },
    "layers that draft": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
    "max_lora_rank": {"max_lora_rank": 8},
    "max_loras": {"max_loras": 2},
    "preemption": {"preemption": "swap"},
    "program_scope": {"program_scope": "step"},
    "chosen number of drafts": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": "auto"}
    },
    "resident_kv_tokens": {"resident_kv_tokens": 64, "kv_on": "host"},
    "scheduler": {"scheduler": "medha"},
    "steps_per_weight_read": {"steps_per_weight_read": 2, "weights_on": "disk"},
    "resident_weight_bytes": {"resident_weight_bytes": 1 << 20},
    "shadow_budget": {"shadow_budget": 2048},
    "shadow_outliers": {"shadow_outliers": 48},
    "shadow_rank": {"shadow_rank": 160},
    "sparf_budget": {"sparf_budget": 64},
    "sparf_components": {"sparf_components": 8},
    "shared_prefix_attention": {"shared_prefix_attention": "enabled"},
    "speculative_config": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    "target_step_us": {"target_step_us": 5},
    "trees of drafts": {"speculative_config": TREE},
    "weights_on": {"weights_on": "disk"},
}
PAIRS = [(rule, other) for rule in EXCLUSIONS for other in rule.others]


def in_use(name: str) -> dict[str, object]:
    """Settings with which `name` is in use."""
    return IN_USE.get(name, {name: 2 if name.endswith("_size") else True})


@pytest.mark.parametrize(
    ("rule", "other"), PAIRS, ids=[f"{rule.setting}-{other}" for rule, other in PAIRS]
)
def test_each_pair_is_refused_with_its_reason(rule, other):
    EngineConfig(**in_use(rule.setting))
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**in_use(rule.setting) | in_use(other))
    assert rule.why in str(refused.value)


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: need.setting)
def test_each_need_is_named(need):
    default = next(
        field.default for field in dataclasses.fields(EngineConfig) if field.name == need.needed
    )
    message = rf"{need.setting} is .*, but {need.needed} is .*{need.why}"
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**in_use(need.setting) | {need.needed: default})
