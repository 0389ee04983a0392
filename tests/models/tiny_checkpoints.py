"""Small random models on disk, written with the formats' own libraries."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

VOCAB = 256
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


def of_experts(architecture: str) -> dict[str, Any]:
    """Fields of a mixture of experts, of an architecture that has one."""
    fields = {"architectures": [architecture], "num_experts": 4, "num_experts_per_tok": 2}
    if architecture.startswith("Qwen"):
        fields["moe_intermediate_size"] = 32
    if architecture.startswith("Qwen2"):
        fields["shared_expert_intermediate_size"] = 64
    return fields


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
    "mlp.router": "ffn_gate_inp",
    "self_attn.sinks": "attn_sinks",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OWN_GGUF_NAMES = {
    "deepseek2": {
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_b_proj": "attn_kv_b",
        "self_attn.k_b_proj": "attn_k_b",
        "self_attn.v_b_proj": "attn_v_b",
        "mlp.gate.e_score_correction": "exp_probs_b",
        "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
        "mlp.shared_experts.up_proj": "ffn_up_shexp",
        "mlp.shared_experts.down_proj": "ffn_down_shexp",
    },
    "gemma2": _GEMMA_NORMS,
    "gemma3": _GEMMA_NORMS,
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm"},
    "olmo2": {
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}
_FUSED = {
    "self_attn.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
}


def hf_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes as transformers saves such a model."""
    hidden, ff, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    architecture = config["architectures"][0]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (queries, hidden),
            prefix + "self_attn.k_proj.weight": (keys, hidden),
            prefix + "self_attn.v_proj.weight": (keys, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, queries),
        }
        if architecture == "GptOssForCausalLM":
            shapes |= _of_gpt_oss(config, prefix)
        elif architecture == "MixtralForCausalLM":
            shapes |= _experts(config, prefix + "block_sparse_moe.", ("w1", "w3", "w2"), ff)
        elif "moe" in architecture.lower():
            own = ff if architecture == "OlmoeForCausalLM" else config["moe_intermediate_size"]
            shapes |= _experts(config, prefix + "mlp.", _PROJECTIONS, own)
        else:
            shapes |= _mlp(prefix + "mlp.", _PROJECTIONS, ff, hidden)
        if architecture == "Qwen2MoeForCausalLM":
            shared = config["shared_expert_intermediate_size"]
            shapes |= _mlp(prefix + "mlp.shared_expert.", _PROJECTIONS, shared, hidden)
            shapes[prefix + "mlp.shared_expert_gate.weight"] = (1, hidden)
        if architecture in ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM"):
            shapes |= {
                prefix + "self_attn.q_proj.bias": (queries,),
                prefix + "self_attn.k_proj.bias": (keys,),
                prefix + "self_attn.v_proj.bias": (keys,),
            }
        if architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Gemma3ForCausalLM"):
            shapes |= {prefix + f"self_attn.{which}_norm.weight": (dim,) for which in "qk"}
        if architecture.startswith("Gemma"):
            norms = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
            shapes |= {prefix + norm + ".weight": (hidden,) for norm in norms}
        if architecture == "Phi3ForCausalLM":
            for fused, parts in _FUSED.items():
                rows = sum(shapes.pop(f"{prefix}{part}.weight")[0] for part in parts)
                shapes[f"{prefix}{fused}.weight"] = (rows, hidden)
        if architecture == "OlmoeForCausalLM":
            shapes[prefix + "self_attn.q_norm.weight"] = (queries,)
            shapes[prefix + "self_attn.k_norm.weight"] = (keys,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _mlp(
    prefix: str, projections: tuple[str, str, str], ff: int, hidden: int
) -> dict[str, tuple[int, ...]]:
    names = [f"{prefix}{name}.weight" for name in projections]
    return dict(zip(names, [(ff, hidden), (ff, hidden), (hidden, ff)], strict=True))


def _experts(
    config: dict[str, Any], prefix: str, projections: tuple[str, str, str], ff: int
) -> dict[str, tuple[int, ...]]:
    shapes = {prefix + "gate.weight": (config["num_experts"], config["hidden_size"])}
    for index in range(config["num_experts"]):
        shapes |= _mlp(f"{prefix}experts.{index}.", projections, ff, config["hidden_size"])
    return shapes


def _of_gpt_oss(config: dict[str, Any], prefix: str) -> dict[str, tuple[int, ...]]:
    """With the names of single experts, which `fused_experts` makes those of files."""
    shapes = _experts(config, prefix + "mlp.", _PROJECTIONS, config["intermediate_size"])
    shapes[prefix + "mlp.router.weight"] = shapes.pop(prefix + "mlp.gate.weight")
    heads, dim = config["num_attention_heads"], config["head_dim"]
    outputs = [heads, config["num_key_value_heads"], config["num_key_value_heads"]]
    projections = [f"{prefix}self_attn.{which}_proj" for which in "qkv"]
    biased = {name: (count * dim,) for name, count in zip(projections, outputs, strict=True)}
    biased[prefix + "self_attn.o_proj"] = (config["hidden_size"],)
    biased |= {
        name.removesuffix(".weight"): shape[:1] for name, shape in shapes.items() if "mlp" in name
    }
    return (
        shapes
        | {f"{name}.bias": shape for name, shape in biased.items()}
        | {prefix + "self_attn.sinks": (heads,)}
    )


def fused_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors as gpt-oss is saved unquantized: one for all experts, transposed, with gate and up in
    turn."""
    whole = _stacked_experts(tensors)
    for name in [name for name in whole if ".experts.gate_proj." in name]:
        both = [whole.pop(name), whole.pop(name.replace("gate_proj", "up_proj"))]
        in_turn = np.stack(both, axis=2).reshape(len(both[0]), -1, *both[0].shape[2:])
        whole[name.replace("gate_proj", "gate_up_proj")] = in_turn
    for name in [name for name in whole if ".experts." in name]:
        stem, _, kind = name.rpartition(".")
        tensor = whole.pop(name)
        if kind == "weight":
            whole[stem] = np.ascontiguousarray(tensor.swapaxes(1, 2))
        else:
            whole[f"{stem}_bias"] = tensor
    return whole


def random_tensors(config: dict[str, Any], dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: rng.normal(size=shape).astype(np.float32).astype(dtype)
        for name, shape in hf_shapes(config).items()
    }


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer without merges: one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


def write_hf(
    directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], shards: int = 1
) -> Path:
    """A Hugging Face directory, with an index when there are several shards."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        mine = dict(list(tensors.items())[shard::shards])
        save_file(mine, directory / file)
        weight_map |= dict.fromkeys(mine, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def write_gguf(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    raw: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    metadata: dict[str, Any] | None = None,
    split_tensors: int = 0,
) -> Path:
    """A GGUF file as llama.cpp's converter writes it: matrices as `kind`, the rest as F32.

    `raw` gives blocks for some GGUF tensor names; `metadata` adds scalar keys. `split_tensors`
    spreads the tensors over files of so many each, `path` being a stem then.
    """
    writer = gguf.GGUFWriter(
        path, architecture, split_max_tensors=split_tensors, use_temp_file=False
    )
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*sorted(pre_tokenizers.ByteLevel.alphabet())[:-1], "ab"])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_array("tokenizer.ggml.merges", ["a b"])
    add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}
    add[bool] = writer.add_bool
    for key, value in (metadata or {}).items():
        add[type(value)](key, value)
    tensors = _stacked_experts(tensors)
    for name, tensor in tensors.items():
        short = gguf_name(name, architecture)
        if short in (raw or {}):
            blocks, block_kind = raw[short]
            writer.add_tensor(short, blocks, raw_dtype=block_kind)
            continue
        if architecture in ("llama", "smollm3") and (".attn_q." in short or ".attn_k." in short):
            tensor = _interleave(tensor, config["head_dim"])
        if architecture in ("gemma2", "gemma3") and short.endswith("norm.weight"):
            tensor = tensor + 1
        is_matrix = tensor.ndim > 1 and not short.endswith("bias")
        stored = kind if is_matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(short, gguf.quantize(tensor, stored), raw_dtype=stored)
    for short in set(raw or {}) - {gguf_name(name, architecture) for name in tensors}:
        writer.add_tensor(short, raw[short][0], raw_dtype=raw[short][1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stacked_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One tensor [experts, ...] for those of all experts, and no dimension of one."""
    stacks: dict[str, list[np.ndarray]] = {}
    for name, tensor in tensors.items():
        stacks.setdefault(re.sub(r"experts\.\d+\.", "experts.", name), []).append(tensor)
    return {
        name: np.stack(parts) if ".experts." in name else parts[0].squeeze()
        for name, parts in stacks.items()
    }


def gguf_name(name: str, architecture: str = "llama") -> str:
    names = _GGUF_NAMES | _OWN_GGUF_NAMES.get(architecture, {})
    stem, _, suffix = (name + ".weight" if name.endswith("sinks") else name).rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{names[stem]}.{suffix}"
    layer, _, module = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{names[module]}.{suffix}"


def _interleave(tensor: np.ndarray, head_dim: int) -> np.ndarray:
    """Row i of the first half of a head, then row i of the second half, for every i."""
    rows = []
    for head in range(0, tensor.shape[0], head_dim):
        for i in range(head_dim // 2):
            rows += [tensor[head + i], tensor[head + head_dim // 2 + i]]
    return np.stack(rows)
