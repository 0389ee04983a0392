"""Embeddings and scores: parameters of such a request, and what is made of hidden states."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence as SequenceOf
from typing import ClassVar, Literal, Self, get_args

import numpy as np

from jaxserve.core.errors import RequestError
from jaxserve.core.requests.outputs import RequestMetrics, RequestOutput
from jaxserve.core.requests.sampling_params import SamplingParams

Pooling = Literal["last", "mean"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """How the final hidden states of a prompt become one vector; any field out of range raises
    RequestError.

    `pooling` takes the hidden state of the last token, or the mean over all tokens. `dimensions`
    keeps only the first of its numbers, which is meant for models trained for that (Matryoshka).
    Then `normalize` scales it to length 1.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    dimensions: int | None = None
    priority: int = 0

    n: ClassVar[int] = 1
    max_tokens: ClassVar[int] = 1
    sampling: ClassVar[SamplingParams] = SamplingParams(
        temperature=0, max_tokens=1, detokenize=False
    )
    """Of its sequence, whose only token is never sampled."""

    def __post_init__(self) -> None:
        if self.pooling not in get_args(Pooling):
            raise RequestError(f"pooling is {self.pooling!r:.80}; it must be 'last' or 'mean'.")
        if not isinstance(self.normalize, bool):
            raise RequestError(f"normalize must be True or False, got {self.normalize!r:.80}.")
        for name, least in (("dimensions", 1), ("priority", -(2**31) + 1)):
            value = getattr(self, name)
            if value is None and name == "dimensions":
                continue
            if type(value) is not int or not least <= value < 2**31:
                raise RequestError(f"{name} must be an integer of {least} or more, got {value!r}.")

    def check_size(self, hidden_size: int) -> None:
        """Raises RequestError for more dimensions than hidden states have."""
        if self.dimensions is not None and self.dimensions > hidden_size:
            raise RequestError(
                f"dimensions is {self.dimensions}; embeddings of this model have {hidden_size}."
            )

    def embedding(self, pooled: np.ndarray) -> list[float] | None:
        """The embedding of a pooled hidden state, float32 [hidden]; None if it is not finite."""
        vector = pooled[: self.dimensions].astype(np.float64)
        if self.normalize:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        return vector.astype(np.float32).tolist() if np.isfinite(vector).all() else None


@dataclasses.dataclass(frozen=True)
class EmbeddingOutput:
    """One vector; empty for a prompt that failed."""

    embedding: list[float]


@dataclasses.dataclass(frozen=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding. `error` is the error message if it failed."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: EmbeddingOutput
    metrics: RequestMetrics
    finished: bool = True
    error: str | None = None

    @classmethod
    def of(cls, output: RequestOutput) -> Self:
        """The output of a request with PoolingParams."""
        return cls(
            output.request_id,
            output.prompt,
            output.prompt_token_ids,
            EmbeddingOutput(output.embedding or []),
            output.metrics,
            output.finished,
            output.error,
        )


@dataclasses.dataclass(frozen=True)
class ScoringOutput:
    """The cosine similarity of two embeddings; NaN if one of the texts failed."""

    score: float


@dataclasses.dataclass(frozen=True)
class ScoringRequestOutput:
    """A pair of texts and its score. `error` is the error message if one of them failed."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: ScoringOutput
    finished: bool = True
    error: str | None = None

    @classmethod
    def of(cls, first: EmbeddingRequestOutput, second: EmbeddingRequestOutput) -> Self:
        """The score of two texts."""
        return cls(
            f"{first.request_id}-{second.request_id}",
            first.prompt_token_ids + second.prompt_token_ids,
            ScoringOutput(similarity(first.outputs.embedding, second.outputs.embedding)),
            first.finished and second.finished,
            first.error or second.error,
        )


def similarity(first: SequenceOf[float], second: SequenceOf[float]) -> float:
    """The cosine of the angle between two embeddings; NaN if one is empty."""
    if not first or not second:
        return math.nan
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12))


def pairs(first: SequenceOf[str], second: SequenceOf[str]) -> list[tuple[int, int]]:
    """The pairs of texts to score, by index: one against all, or in order. Raises RequestError for
    numbers of texts that do not pair up."""
    if not first or not second or (len(first) != len(second) and len(first) != 1):
        raise RequestError(
            f"text_1 has {len(first)} texts and text_2 {len(second)}; give one to compare with "
            "all of text_2, or as many."
        )
    return [(index if len(first) > 1 else 0, index) for index in range(len(second))]
