"""Model hyperparameters: one frozen description shared by all model families."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

from jaxserve.core.errors import UnsupportedModelError

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, in the terms of Hugging Face's `rope_scaling`.

    `theta` is the base; the other fields apply to some kinds only. `rotary_dim` is the number of
    leading head dimensions that rotate.
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    rotary_dim: int = 64
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None


class LayerKind(NamedTuple):
    """The properties in which layers of a model differ; layers of a kind share a program.

    `window` is the attention window in tokens, None for full attention; `rotates` says whether
    queries and keys are rotated, `sparse` whether the MLP is a mixture of experts.
    """

    window: int | None
    rotates: bool
    sparse: bool = False

    def __str__(self) -> str:
        """Part of the names of its programs."""
        rotates = "" if self.rotates else "-unrotated"
        return f"{self.window or 'full'}{rotates}{'-moe' if self.sparse else ''}"


class ClampedSwiGLU(NamedTuple):
    """The activation of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1), with the gate at most
    `limit`, and up within `limit` of zero."""

    alpha: float
    limit: float


class ExpertGroups(NamedTuple):
    """Equal groups of experts, of which a token chooses `chosen`, and its experts from these. The
    score of a group is the sum of those of its `best` best experts (DeepSeek)."""

    count: int
    chosen: int
    best: int


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts: an MLP of which each token takes `num_experts_per_tok` of `num_experts`
    parts.

    `intermediate_size` is the inner dimension of one expert, `shared_intermediate_size` that of an
    expert that every token takes, 0 for none; `shared_gate` says whether that one is weighted by a
    gate of its own. A token's experts have the best scores, a function `scores` of the router's
    logits, within the groups that it chose; `corrected` scores get a bias of their expert to
    choose by, and not to weight by. With `norm_topk_prob` the weights of a token's experts are
    scaled to a sum of one, and then all by `routed_scale`. `sparse_layers[i]` says whether layer i
    has a mixture; others have one MLP. `biased` routers and experts have biases; `clamped` is the
    activation of experts, None for SwiGLU.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    sparse_layers: tuple[bool, ...]
    shared_intermediate_size: int = 0
    norm_topk_prob: bool = False
    biased: bool = False
    clamped: ClampedSwiGLU | None = None
    shared_gate: bool = True
    scores: Literal["softmax", "sigmoid"] = "softmax"
    corrected: bool = False
    groups: ExpertGroups | None = None
    routed_scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek V2, 2405.04434): the keys and values of all heads
    follow from one latent of a token, `kv_rank` features, beside `rope_dim` rotated ones.

    A head has `nope_dim` features of a key that do not rotate and `value_dim` of a value. Queries
    follow from a latent of `q_rank` features, or from the hidden state (None). `interleaved`: the
    checkpoint rotates neighbouring features, and not those half of `rope_dim` apart.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool = True

    @property
    def uncompressed_from(self) -> int | None:
        """Tokens from which on a prefill chunk attends to itself by keys and values of heads, and
        not by latents; None for never.

        In each head a pair of tokens then takes nope_dim + rope_dim + value_dim products, not
        2 * kv_rank + rope_dim, and each token takes (nope_dim + value_dim) * kv_rank to make its
        key and value. Of n tokens a causal mask leaves n / 2 pairs for each.
        """
        of_head = self.nope_dim + self.value_dim
        saved = 2 * self.kv_rank - of_head
        return 2 * of_head * self.kv_rank // saved + 1 if saved > 0 else None


class KVSpec(NamedTuple):
    """The keys and values that a layer keeps of each token, and of which tokens: the last `window`,
    None for all. `latent` keys have their values in them."""

    num_kv_heads: int
    head_dim: int
    window: int | None
    latent: bool = False

    @property
    def elements(self) -> int:
        """Numbers stored for one token."""
        return (1 if self.latent else 2) * self.num_kv_heads * self.head_dim


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and arithmetic of a decoder-only transformer.

    `sliding_windows[i]` is the attention window of layer i in tokens, or None for full attention;
    `rope_layers[i]` says whether layer i rotates queries and keys (SmolLM3 omits some layers);
    layers with a window rotate by `window_rope` if that is not None (Gemma 3). Attention scores are
    scaled by 1 / sqrt(`query_pre_attn_scalar`), by default `head_dim`. With a soft cap c, scores
    (`attention_soft_cap`) or logits (`logit_soft_cap`) x become c * tanh(x / c).
    `eos_token_ids` end a generation; `default_sampling` has the recommendations of the model's
    `generation_config.json` (temperature, top_p and so on). `normed_heads` are the query and KV
    heads that a norm over all heads counts, if there are also copied or padding heads
    (models/partition.py). `clip_qkv` is the largest magnitude of queries, keys and values (OLMoE).
    With `attention_sinks` each head has a logit of its own in its softmax, without a value. With
    `mla`, attention is that to latents: they are the one KV head, of `head_dim` features, and their
    first `value_dim` are the values. `num_mtp_layers` of the checkpoint follow the last layer and
    predict further tokens (DeepSeek V3); the first of them drafts (models/drafters/mtp.py).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: RopeConfig
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    rope_layers: tuple[bool, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    default_sampling: tuple[tuple[str, Any], ...] = ()
    name: str = ""
    normed_heads: tuple[int, int] | None = None
    window_rope: RopeConfig | None = None
    query_pre_attn_scalar: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    moe: MoEConfig | None = None
    clip_qkv: float | None = None
    attention_sinks: bool = False
    mla: MLAConfig | None = None
    num_mtp_layers: int = 0

    def __post_init__(self) -> None:
        if not self.sliding_windows:
            object.__setattr__(self, "sliding_windows", (None,) * self.num_layers)
        if not self.rope_layers:
            object.__setattr__(self, "rope_layers", (True,) * self.num_layers)
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"{self.num_heads} query heads are not divisible by "
                f"{self.num_kv_heads} key/value heads; fix num_key_value_heads in the config."
            )
        for field in ("sliding_windows", "rope_layers"):
            if len(getattr(self, field)) != self.num_layers:
                raise UnsupportedModelError(
                    f"{field} lists {len(getattr(self, field))} layers, "
                    f"but the model has {self.num_layers}."
                )

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer, in order."""
        sparse = self.moe.sparse_layers if self.moe else (False,) * self.num_layers
        return tuple(map(LayerKind, self.sliding_windows, self.rope_layers, sparse))

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """What every layer keeps, in order."""
        return tuple(
            KVSpec(self.num_kv_heads, self.head_dim, window, self.mla is not None)
            for window in self.sliding_windows
        )

    @property
    def value_dim(self) -> int:
        """Features of a value that attention returns for a head."""
        return self.mla.kv_rank if self.mla else self.head_dim

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def attention_scale(self) -> float:
        return 1.0 / math.sqrt(self.query_pre_attn_scalar or self.head_dim)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of one token's keys and values over all layers."""
        return itemsize * sum(spec.elements for spec in self.kv_specs)
