"""Scheduler settings."""

from __future__ import annotations

import dataclasses

from jaxserve.core.errors import ConfigError
from jaxserve.core.settings.config import EngineConfig, share_of_step
from jaxserve.core.steps.buckets import Buckets
from jaxserve.scheduler.decode_groups import PrefixCost
from jaxserve.scheduler.policies import POLICIES


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step and admission rules.

    max_num_seqs: maximum number of running sequences, R.
    max_num_batched_tokens: token budget of a step, τ.
    max_prefill_tokens: prefill tokens of the largest program.
    max_model_len: context limit in tokens, prompt and output.
    watermark: share of the pool that an admission leaves free for running sequences.
    min_chunk_tokens: minimum tokens of a prefill chunk, except the last one of a prompt.
    fair_share: admit the tenant that was served least, instead of the oldest request.
    priority_ageing_us: waiting time that equals one priority level; None for strict levels.
    num_stages: steps in flight in a pipeline.
    steps_per_weight_read: steps that run together, none of which may need a token of another.
    target_step_us: target for the predicted step time with prefills, for "timed" chunks only.
    draft_lengths: numbers of drafts that a decode may have, ascending from 0; of more than two the
        scheduler chooses.
    drafter: the method of speculation, if it computes its drafts and can fail to.
    buckets: sizes that steps are padded to, which determine the step time.
    prefix_cost: of decodes that read the pages that they share together; None if they never do.
    """

    policy: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens: int
    max_model_len: int
    watermark: float = 0.01
    min_chunk_tokens: int = 16
    fair_share: bool = False
    priority_ageing_us: int | None = None
    num_stages: int = 1
    steps_per_weight_read: int = 1
    target_step_us: int | None = None
    draft_lengths: tuple[int, ...] = (0,)
    drafter: str | None = None
    buckets: Buckets | None = None
    prefix_cost: PrefixCost | None = None

    @classmethod
    def of(
        cls, config: EngineConfig, buckets: Buckets, prefix_cost: PrefixCost | None = None
    ) -> SchedulerConfig:
        """The limits of an engine's scheduler, for a resolved config."""
        ageing_s, speculative = config.priority_ageing_s, config.speculative_config
        return cls(
            policy=config.scheduler,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_prefill_tokens=buckets.max_prefill_tokens,
            max_model_len=config.max_model_len,
            fair_share=config.fair_share,
            priority_ageing_us=None if ageing_s is None else round(ageing_s * 1e6),
            num_stages=config.pipeline_parallel_size,
            steps_per_weight_read=config.steps_per_weight_read,
            target_step_us=config.target_step_us,
            draft_lengths=config.draft_lengths,
            drafter=speculative.method if speculative and speculative.computed else None,
            buckets=buckets,
            prefix_cost=prefix_cost,
        )

    @property
    def max_step_seqs(self) -> int:
        """As of EngineConfig."""
        return share_of_step(self.max_num_seqs, self.steps_per_weight_read)

    def __post_init__(self) -> None:
        """Raises ConfigError when a limit is out of range or would starve prefills."""
        if self.policy not in POLICIES:
            raise ConfigError(f"unknown scheduler {self.policy!r}; one of {', '.join(POLICIES)}")
        for name in ("max_num_seqs", "min_chunk_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_model_len < 2:
            raise ConfigError(f"max_model_len is {self.max_model_len}; it must be at least 2")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark is {self.watermark}; it must be in [0, 1)")
        if self.priority_ageing_us is not None and self.priority_ageing_us < 1:
            raise ConfigError(
                f"priority_ageing_us is {self.priority_ageing_us}; it must be at least 1, or None "
                "for strict levels"
            )
        timed = POLICIES[self.policy].chunk == "timed"
        if timed != (self.target_step_us is not None) or (timed and self.buckets is None):
            raise ConfigError(
                f"target_step_us is {self.target_step_us} with scheduler {self.policy!r}; timed "
                "chunks need both target_step_us and buckets, other schedulers take no target"
            )
        if timed and self.target_step_us < 1:
            raise ConfigError(f"target_step_us is {self.target_step_us}; it must be at least 1")
        if self.max_prefill_tokens < self.min_chunk_tokens:
            raise ConfigError(
                f"max_prefill_tokens is {self.max_prefill_tokens}; "
                f"it must be at least min_chunk_tokens, {self.min_chunk_tokens}"
            )
        least = self.max_step_seqs * (1 + self.draft_lengths[-1]) + self.min_chunk_tokens
        if self.max_num_batched_tokens < least:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; with max_num_seqs "
                f"{self.max_num_seqs} it must be at least {least}, so that running sequences "
                "leave room for new prompts"
            )
