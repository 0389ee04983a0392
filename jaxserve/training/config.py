"""Settings of the training of a drafter."""

from __future__ import annotations

import dataclasses
import math

from jaxserve.core.errors import ConfigError
from jaxserve.core.settings.speculative import MAX_SPECULATIVE_TOKENS


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """How a drafter is trained.

    Attributes:
        num_heads: tokens that are guessed beyond the next one: by Medusa each by a head of its own;
            a layer of EAGLE-3 is trained in so many passes, and one of EAGLE only measured with so
            many. Either may draft more.
        draft_vocab_size: tokens that a layer of EAGLE-3 can guess, the most frequent of the
            answers; all if the model has no more.
        steps: batches to train on.
        batch_size: sequences of a batch.
        sequence_length: tokens of a sequence.
        learning_rate: the highest; it rises, and falls to 0 along a cosine.
        checkpoint_every: steps between checkpoints, from which training goes on when it is run
            again.
        seed: of the order of the batches, and of all else that is random.
    """

    num_heads: int = 3
    draft_vocab_size: int = 8192
    steps: int = 300
    batch_size: int = 4
    sequence_length: int = 256
    learning_rate: float = 1e-3
    checkpoint_every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the field and its value."""
        for field in ("num_heads", "draft_vocab_size", "steps", "batch_size", "checkpoint_every"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} is {getattr(self, field)}; it must be 1 or more.")
        if self.num_heads > MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"num_heads is {self.num_heads}; speculation drafts {MAX_SPECULATIVE_TOKENS} "
                "tokens at most."
            )
        if self.sequence_length < self.num_heads + 2:
            raise ConfigError(
                f"sequence_length is {self.sequence_length}; heads that guess {self.num_heads} "
                f"tokens ahead need {self.num_heads + 2} or more."
            )
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"learning_rate is {self.learning_rate}; it must be positive.")
        if not 0 <= self.seed < 1 << 32:
            raise ConfigError(f"seed is {self.seed}; it must be from 0 to {(1 << 32) - 1}.")
