"""Model families by architecture. A new built-in family is one file and one line here; an external
one is registered."""

from __future__ import annotations

from jaxserve.core.errors import ConfigError, UnsupportedModelError
from jaxserve.core.model_config import ModelConfig
from jaxserve.core.model_files import shown
from jaxserve.models.families import (
    deepseek,
    gemma2,
    gemma3,
    gpt_oss,
    llama,
    mixtral,
    olmo2,
    olmoe,
    phi3,
    qwen_moe,
)
from jaxserve.models.family import Family, Params

ARCHITECTURES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": deepseek.V2,
    "DeepseekV3ForCausalLM": deepseek.V3,
    "Gemma2ForCausalLM": gemma2.FAMILY,
    "Gemma3ForCausalLM": gemma3.FAMILY,
    "Gemma3ForConditionalGeneration": gemma3.BESIDE_VISION,
    "GptOssForCausalLM": gpt_oss.FAMILY,
    "LlamaForCausalLM": llama.FAMILY,
    "MistralForCausalLM": llama.FAMILY,
    "MixtralForCausalLM": mixtral.FAMILY,
    "Olmo2ForCausalLM": olmo2.FAMILY,
    "OlmoeForCausalLM": olmoe.FAMILY,
    "Phi3ForCausalLM": phi3.FAMILY,
    "Qwen2ForCausalLM": llama.FAMILY,
    "Qwen2MoeForCausalLM": qwen_moe.QWEN2,
    "Qwen3ForCausalLM": llama.FAMILY,
    "Qwen3MoeForCausalLM": qwen_moe.QWEN3,
    "SmolLM3ForCausalLM": llama.FAMILY,
}

_registered: dict[str, Family] = {}


def register_family(architecture: str, family: Family) -> None:
    """Use `family` for models whose config.json names `architecture`, in this process.

    Registering again replaces the family, for engines loaded from then on. On several hosts each
    process must register it. Programs of such models are compiled at every start: the program cache
    tracks only jaxserve's own code. Raises ConfigError for a built-in architecture.
    """
    if architecture in ARCHITECTURES:
        raise ConfigError(
            f"architecture {architecture!r} is built into jaxserve; use another name, here and in "
            "the config.json of its models."
        )
    _registered[architecture] = family


def is_registered(architecture: str) -> bool:
    """Whether the family of an architecture is external to jaxserve."""
    return architecture in _registered


def get_family(architecture: str) -> Family:
    """The family of a Hugging Face architecture name; UnsupportedModelError lists known ones."""
    families = ARCHITECTURES | _registered
    try:
        return families[architecture]
    except KeyError:
        known = ", ".join(sorted(families))
        raise UnsupportedModelError(
            f"architecture {shown(architecture)} is not implemented; known are {known}. "
            "docs/adding-a-model.md shows how to add one."
        ) from None


def param_specs(config: ModelConfig) -> Params:
    """The parameters of a model, by the family that its config names."""
    return get_family(config.architecture).param_specs(config)
