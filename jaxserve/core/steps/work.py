"""What a step asks of each device of an engine: weights, attention, messages. Pure sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class ChunkWork:
    """The share of one device in the attention of prefill chunks to their own tokens, where that
    takes keys and values of heads and not latents.

    Attributes:
        least: prefill tokens of a program from which on it does.
        query_size: as of `StepWork`, for these pairs.
        weights: multiplied with every token of the chunk in one layer, to make its key and value.
    """

    least: int
    query_size: int
    weights: int


@dataclasses.dataclass(frozen=True)
class StepWork:
    """The share of one device, of `tensor * stages * seq`, in every step.

    Attributes:
        dtype: of activations and products.
        itemsize: bytes of one number of that dtype.
        hidden_size: activations of a token between layers.
        windows: how many layers a stage has of each attention window; None is full attention.
        layer_weights: weights of the layers, each multiplied with every token.
        layer_bytes: bytes that they take.
        expert_weights: weights of the experts of mixtures.
        expert_bytes: bytes that they take.
        expert_share: the share of the experts that one token is multiplied with.
        head_weights: weights of the output head, multiplied with every sampled token.
        head_bytes: bytes that they take.
        query_size: numbers of a token's queries in one layer, and of the results of attention: of
            latents the mean of both.
        kv_bytes: bytes of a token's keys and values in one layer, over all `seq` devices that
            share a sequence.
        tensor: devices that split each layer.
        stages: pipeline stages.
        seq: devices that split a sequence.
        chunks: how chunks attend to themselves, if not as to what is before them.
    """

    dtype: str
    itemsize: int
    hidden_size: int
    windows: Mapping[int | None, int]
    layer_weights: int
    layer_bytes: int
    head_weights: int
    head_bytes: int
    query_size: int
    kv_bytes: int
    expert_weights: int = 0
    expert_bytes: int = 0
    expert_share: float = 1.0
    tensor: int = 1
    stages: int = 1
    seq: int = 1
    chunks: ChunkWork | None = None

    @property
    def num_layers(self) -> int:
        """Layers of a stage."""
        return sum(self.windows.values())

    @property
    def weights_per_token(self) -> float:
        """Weights of the layers that one token is multiplied with."""
        return self.layer_weights + self.expert_weights * self.expert_share

    def weight_bytes(self, num_tokens: float) -> float:
        """Bytes of the layers that a step of so many tokens reads, if each token takes its experts
        independently and all are equally likely."""
        untouched = (1 - self.expert_share) ** num_tokens
        return self.layer_bytes + self.expert_bytes * (1 - untouched)

    @property
    def num_devices(self) -> int:
        return self.tensor * self.stages * self.seq

    def prefill_attention(
        self, prefill_tokens: int, start: int, stop: int, window: int | None
    ) -> float:
        """FLOPs of one layer's attention of the chunk at positions `start .. stop - 1`, in a
        program of so many prefill tokens."""
        pairs, chunks = pairs_seen(start, stop, window), self.chunks
        if chunks is None or prefill_tokens < chunks.least:
            return 4 * self.query_size * pairs / self.seq
        own = pairs_seen(0, stop - start, window)
        of_heads = 4 * chunks.query_size * own + 2 * chunks.weights * (stop - start)
        return (4 * self.query_size * (pairs - own) + of_heads) / self.seq


@dataclasses.dataclass(frozen=True)
class DraftWork:
    """What a method of speculation computes on each device to draft.

    Attributes:
        each: a pass, which drafts one token for every decode of a step.
        tokens: of a decode in a pass: those whose keys and values the drafter lacks.
        always: whether there is a pass where nothing is verified, for later drafts of sequences
            that may have some.
        prompts: whether it computes the prompts as well.
    """

    each: StepWork
    tokens: int = 1
    always: bool = False
    prompts: bool = False


def causal_pairs(start: int, stop: int) -> int:
    """Query-key pairs of the tokens at positions `start .. stop - 1` under a causal mask. Additive
    over chunks: the chunking of a prompt makes no difference."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


def pairs_seen(start: int, stop: int, window: int | None) -> int:
    """Pairs of a query at positions `start .. stop - 1` and a key that it sees."""
    if window is None or stop <= window:
        return causal_pairs(start, stop)
    full = max(start, window)
    return causal_pairs(start, full) + (stop - full) * window
