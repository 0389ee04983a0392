"""Small random models on disk, written with the formats' own libraries."""

from __future__ import annotations

import json
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
            prefix + "mlp.gate_proj.weight": (ff, hidden),
            prefix + "mlp.up_proj.weight": (ff, hidden),
            prefix + "mlp.down_proj.weight": (hidden, ff),
        }
        if architecture == "Qwen2ForCausalLM":
            shapes |= {
                prefix + "self_attn.q_proj.bias": (queries,),
                prefix + "self_attn.k_proj.bias": (keys,),
                prefix + "self_attn.v_proj.bias": (keys,),
            }
        if architecture == "Qwen3ForCausalLM":
            shapes |= {prefix + f"self_attn.{which}_norm.weight": (dim,) for which in "qk"}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


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
    for key, value in (metadata or {}).items():
        add[type(value)](key, value)
    for name, tensor in tensors.items():
        short = gguf_name(name)
        if short in (raw or {}):
            blocks, block_kind = raw[short]
            writer.add_tensor(short, blocks, raw_dtype=block_kind)
            continue
        if architecture in ("llama", "smollm3") and (".attn_q." in short or ".attn_k." in short):
            tensor = _interleave(tensor, config["head_dim"])
        stored = kind if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(short, gguf.quantize(tensor, stored), raw_dtype=stored)
    for short in set(raw or {}) - {gguf_name(name) for name in tensors}:
        writer.add_tensor(short, raw[short][0], raw_dtype=raw[short][1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_GGUF_NAMES[stem]}.{suffix}"
    layer, _, module = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_GGUF_NAMES[module]}.{suffix}"


def _interleave(tensor: np.ndarray, head_dim: int) -> np.ndarray:
    """Row i of the first half of a head, then row i of the second half, for every i."""
    rows = []
    for head in range(0, tensor.shape[0], head_dim):
        for i in range(head_dim // 2):
            rows += [tensor[head + i], tensor[head + head_dim // 2 + i]]
    return np.stack(rows)
