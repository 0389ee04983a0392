"""Which family implements which architecture. A new family is one file and one line here."""

from __future__ import annotations

from jaxserve.errors import UnsupportedModelError
from jaxserve.models import llama, olmo2
from jaxserve.models.config import ModelConfig
from jaxserve.models.family import Family, Params

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": llama.FAMILY,
    "MistralForCausalLM": llama.FAMILY,
    "Olmo2ForCausalLM": olmo2.FAMILY,
    "Qwen2ForCausalLM": llama.FAMILY,
    "Qwen3ForCausalLM": llama.FAMILY,
    "SmolLM3ForCausalLM": llama.FAMILY,
}


def get_family(architecture: str) -> Family:
    """The family of a Hugging Face architecture name; UnsupportedModelError names those known."""
    try:
        return ARCHITECTURES[architecture]
    except KeyError:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not implemented; known are {known}. "
            "docs/adding-a-model.md shows how to add one."
        ) from None


def param_specs(config: ModelConfig) -> Params:
    """The parameters of a model, by the family that its config names."""
    return get_family(config.architecture).param_specs(config)
