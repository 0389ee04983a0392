"""Write docs/models.md's tables, from the registry, what tests compare, and what plans accept.

python tests/models/models_page.py
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import quantized_checkpoints
from published_families import PUBLISHED

from jaxserve.core.errors import ConfigError, MemoryPlanError, ModelError
from jaxserve.core.model_config import ModelConfig
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.settings.speculative import METHODS as DRAFTING
from jaxserve.models import quantization_config
from jaxserve.models.loading.gguf import config as gguf_config
from jaxserve.models.lora import modules_of
from jaxserve.models.quantization import AS_STORED, FORMATS
from jaxserve.models.quantization_scheme import Scheme
from jaxserve.models.registry import ARCHITECTURES, get_family, param_specs
from jaxserve.runtime.hardware.devices import DescribedDevice
from jaxserve.runtime.startup import engine_plan
from pallas_kernels.quantized_matmul import abstract_weight

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
GOLDEN = Path(__file__).parent / "golden" / "families.json"
_TABLE = r"(<!-- {0} -->\n)(.*?)(<!-- end of {0} -->)"
_HEAD = "| architecture | models | GGUF | compared with transformers | on meshes |\n"
MODELS = {
    "DeepseekV2ForCausalLM": "DeepSeek V2, V2-Lite, V2.5, Coder V2",
    "DeepseekV3ForCausalLM": "DeepSeek V3, V3.1, R1, Moonlight",
    "Gemma2ForCausalLM": "Gemma 2",
    "Gemma3ForCausalLM": "Gemma 3 270M, 1B",
    "Gemma3ForConditionalGeneration": "Gemma 3 4B, 12B, 27B, which answer text",
    "GptOssForCausalLM": "gpt-oss-20b, gpt-oss-120b",
    "LlamaForCausalLM": "Llama 2, 3 and later dense ones, SmolLM2",
    "MistralForCausalLM": "Mistral 7B, Nemo, Small",
    "MixtralForCausalLM": "Mixtral 8x7B, 8x22B",
    "Olmo2ForCausalLM": "OLMo 2",
    "OlmoeForCausalLM": "OLMoE",
    "Phi3ForCausalLM": "Phi-3 mini and medium, Phi-3.5-mini, Phi-4, Phi-4-mini",
    "Qwen2ForCausalLM": "Qwen2, Qwen2.5",
    "Qwen2MoeForCausalLM": "Qwen1.5-MoE, Qwen2-57B-A14B",
    "Qwen3ForCausalLM": "Qwen3, dense",
    "Qwen3MoeForCausalLM": "Qwen3-30B-A3B, Qwen3-235B-A22B",
    "SmolLM3ForCausalLM": "SmolLM3",
}
_FILES_OF = {
    "MistralForCausalLM": "LlamaForCausalLM",
    "MixtralForCausalLM": "LlamaForCausalLM",
    "DeepseekV3ForCausalLM": "DeepseekV2ForCausalLM",
}
"""Whose GGUF files have the architecture of another one."""
_AS = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}
"""Compared by the members of another architecture, which computes the same."""
_OPTIONS: dict[str, Callable[[ModelConfig], bool]] = {
    "biases": lambda config: config.qkv_bias or config.output_bias or config.mlp_bias,
    "tied head": lambda config: config.tie_word_embeddings,
    "`head_dim`": lambda config: (
        not config.mla and config.head_dim * config.num_heads != config.hidden_size
    ),
    "latent attention": lambda config: config.mla is not None,
    "latent queries": lambda config: bool(config.mla and config.mla.q_rank),
    "`rope_interleave`": lambda config: bool(config.mla and not config.mla.interleaved),
    "normed queries and keys": lambda config: config.qk_norm,
    "clipped queries, keys and values": lambda config: config.clip_qkv is not None,
    "windows": lambda config: any(config.sliding_windows),
    "attention sinks": lambda config: config.attention_sinks,
    "soft caps": lambda config: bool(config.attention_soft_cap or config.logit_soft_cap),
    "layers without rotation": lambda config: not all(config.rope_layers),
    "two rotations": lambda config: config.window_rope is not None,
    "experts": lambda config: config.moe is not None,
    "a shared expert": lambda config: bool(config.moe and config.moe.shared_intermediate_size),
    "normed weights of experts": lambda config: bool(config.moe and config.moe.norm_topk_prob),
    "biases of routers and experts": lambda config: bool(config.moe and config.moe.biased),
    "groups of experts": lambda config: bool(config.moe and config.moe.groups),
    "corrected scores of experts": lambda config: bool(config.moe and config.moe.corrected),
    "clamped SwiGLU": lambda config: bool(config.moe and config.moe.clamped),
    "layers without experts": lambda config: bool(config.moe and not all(config.moe.sparse_layers)),
    "partial rotation": lambda config: not config.mla and config.rope.rotary_dim < config.head_dim,
}

_LAYERS = 6
"""Of the published models that are planned, whose layers repeat."""
_CONTEXT = 8192
"""Of the plans, or what a model takes; windows that are longer are none."""
_ROOM = 1 << 40
_KV_DTYPES = ("int8", "fp8", "int4")
_MESHES = {
    "tensor": {"tensor_parallel_size": 2},
    "context": {"context_parallel_size": 2},
    "expert": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}


@functools.cache
def _members() -> dict[str, dict[str, Any]]:
    """The config.json of every tiny model whose logits are compared."""
    members = json.loads(GOLDEN.read_text(encoding="utf-8"))["members"]
    return {name: member["config"] for name, member in members.items()}


@functools.cache
def _on_meshes() -> dict[str, str]:
    """Members to the mesh on which their tokens are compared."""
    with_experts = _assigned("weights/test_mesh_moe.py", "MESHES")
    meshes = {member: mesh for member, (mesh, _) in with_experts.items()}
    return _assigned("test_mesh_answers.py", "FAMILIES") | meshes


def _assigned(file: str, name: str) -> Any:
    """The literal that a file of tests on meshes assigns to `name`."""
    path = ROOT / "tests" / "meshes" / file
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise LookupError(f"{path} has no {name}")


def _row(architecture: str) -> str:
    compared = _AS.get(architecture, architecture)
    names = [name for name, raw in _members().items() if raw["architectures"] == [compared]]
    configs = [get_family(compared).config_from_hf(_members()[name]) for name in names]
    options = [option for option, has in _OPTIONS.items() if any(map(has, configs))]
    kinds = sorted({config.rope.kind for config in configs} - {"default"})
    options += [f"`{kind}` rotation" for kind in kinds]
    meshes = sorted({_on_meshes()[name] for name in names if name in _on_meshes()})
    of_files = _FILES_OF.get(architecture, compared)
    files = sorted(k for k, v in gguf_config.ARCHITECTURES.items() if v == of_files)
    cells = [
        f"`{architecture}`",
        MODELS[architecture],
        ", ".join(f"`{name}`" for name in files),
        ", ".join(options),
        ", ".join(meshes),
    ]
    return "| " + " | ".join(cells) + " |\n"


_TAKEN = (
    "| architecture | KV of | LoRA adapts | `quantization` | `kv_cache_dtype` | `kv_on` | meshes "
    "| drafts |\n"
)


def _taken_rows() -> str:
    """What the plan of the first published model of each architecture accepts."""
    rows = []
    for architecture in ARCHITECTURES:
        raws = (raw for raw in PUBLISHED.values() if raw["architectures"] == [architecture])
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "config.json")
            path.write_text(json.dumps(_shortened(next(raws))), encoding="utf-8")
            rows.append(_taken_row(architecture, path))
    return "".join(rows)


def _shortened(raw: dict[str, Any]) -> dict[str, Any]:
    """A config of fewer layers of the same kinds."""
    if "text_config" in raw:
        return raw | {"text_config": _shortened(raw["text_config"])}
    layers = raw["num_hidden_layers"]
    lists = {
        name: value[:_LAYERS]
        for name, value in raw.items()
        if isinstance(value, list) and len(value) == layers
    }
    return raw | lists | {"num_hidden_layers": _LAYERS}


def _taken_row(architecture: str, path: Path) -> str:
    config = get_family(architecture).config_from_hf(json.loads(path.read_text("utf-8")))
    context = min(_CONTEXT, config.max_position_embeddings)
    accepts = functools.partial(_accepts, path, max_model_len=context)
    assert accepts(), architecture
    kinds = {
        "latents": config.mla is not None,
        "windows": any(map(_in_context, config.sliding_windows)),
    }
    modules = {name.rsplit(".", 1)[-1] for name in modules_of(param_specs(config))}
    drafts = ({"method": method, "num_speculative_tokens": 2} for method in DRAFTING)
    methods = [
        each["method"]
        for each in drafts
        if any(accepts(speculative_config=each | more) for more in ({}, {"num_layers": 1}))
    ]
    cells = [
        f"`{architecture}`",
        ", ".join(kind for kind, has in kinds.items() if has),
        _code(sorted(modules) if accepts(enable_lora=True) else ()),
        _code(name for name in (*FORMATS, *AS_STORED) if accepts(quantization=name)),
        _code(name for name in _KV_DTYPES if accepts(kv_cache_dtype=name)),
        _code(["host"] if accepts(kv_on="host", host_kv_bytes=_ROOM) else ()),
        ", ".join(name for name, settings in _MESHES.items() if accepts(**settings)),
        _code(methods),
    ]
    return "| " + " | ".join(cells) + " |\n"


def _in_context(window: int | None) -> bool:
    return window is not None and window < _CONTEXT


def _accepts(path: Path, **settings: Any) -> bool:
    """Whether an engine is planned with these settings, whatever memory it would need."""
    sizes = {"max_num_seqs": 2, "kv_cache_memory_bytes": 1 << 30}
    try:
        config = EngineConfig(
            model=path, load_format="dummy", dtype="bfloat16", **sizes, **settings
        )
        if config.kv_on == "host":  # Which is planned on devices that are there.
            engine_plan.decide(config)
        else:
            device = DescribedDevice("gpu", "NVIDIA H200", _ROOM)
            engine_plan.plan_described(config, device, propose=False)
    except (ConfigError, ModelError):
        return False
    except MemoryPlanError:
        pass
    return True


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


_INPUTS, _GROUP = 4096, 128


def _held(scheme: Scheme) -> str:
    """What a linear layer of a scheme is on one device, of groups of 128 inputs."""
    if scheme.group_size is not None:
        scheme = dataclasses.replace(scheme, group_size=_GROUP)
    format = scheme.format(_INPUTS)
    if format is None:
        return "values of `dtype`"
    planes = jax.tree.leaves(abstract_weight(_INPUTS, _INPUTS, format))
    bits = 8 * sum(plane.size * plane.dtype.itemsize for plane in planes) / _INPUTS**2
    kind = "float8" if scheme.storage == "fp8" else f"int{scheme.bits}"
    of = "groups" if format.group_size else "outputs"
    also = f"{' and minima' if format.minimum else ''} of {of}"
    order = ", and an order of inputs" if format.ordered else ""
    return f"{kind} with scales{also}{order}, {bits:.3g} bits"


def _quantized_rows() -> str:
    rows = []
    for name, (fields, _) in quantized_checkpoints.FORMATS.items():
        config = quantization_config.parse({"quantization_config": fields})
        scheme = config.scheme("model.layers.0.mlp.down_proj")
        rows.append(f"| {name} | {_held(scheme)} |\n")
    return "".join(rows)


def with_tables(page: str) -> str:
    """The text of the page with its tables as they should be."""
    tables = {
        "architectures": _HEAD + "|---|---|---|---|---|\n" + "".join(map(_row, ARCHITECTURES)),
        "settings": _TAKEN + "|---|---|---|---|---|---|---|---|\n" + _taken_rows(),
        "quantized": "| stored as | a linear layer in memory |\n|---|---|\n" + _quantized_rows(),
    }
    for name, table in tables.items():
        pattern = re.compile(_TABLE.format(name), re.DOTALL)
        page = pattern.sub(functools.partial(_replaced, table), page)
    return page


def _replaced(table: str, match: re.Match[str]) -> str:
    return match[1] + table + match[3]


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
