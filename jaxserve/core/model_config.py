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
    queries and keys are rotated.
    """

    window: int | None
    rotates: bool


class KVSpec(NamedTuple):
    """The keys and values that a layer keeps of each token, and of which tokens: the last `window`,
    None for all."""

    num_kv_heads: int
    head_dim: int
    window: int | None

    @property
    def elements(self) -> int:
        """Numbers stored for one token."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and arithmetic of a decoder-only transformer.

    `sliding_windows[i]` is the attention window of layer i in tokens, or None for full attention;
    `rope_layers[i]` says whether layer i rotates queries and keys (SmolLM3 omits some layers).
    `eos_token_ids` end a generation; `default_sampling` has the recommendations of the model's
    `generation_config.json` (temperature, top_p and so on). `normed_heads` are the query and KV
    heads that a norm over all heads counts, if there are also copied or padding heads
    (models/partition.py).
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
        return tuple(map(LayerKind, self.sliding_windows, self.rope_layers))

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """What every layer keeps, in order."""
        return tuple(
            KVSpec(self.num_kv_heads, self.head_dim, window) for window in self.sliding_windows
        )

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def attention_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of one token's keys and values over all layers."""
        return itemsize * sum(spec.elements for spec in self.kv_specs)
