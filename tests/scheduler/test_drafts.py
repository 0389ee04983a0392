"""The number of drafts: that of the best goodput, in worlds whose best is known."""

from __future__ import annotations

import dataclasses
import math
import random
from statistics import median

import pytest

from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence
from jaxserve.core.settings.speculative import AUTO_LENGTHS
from jaxserve.core.steps.buckets import Buckets
from jaxserve.scheduler.drafts import EXPLORATION_STEPS, AdaptiveDraftLength
from jaxserve.scheduler.step_time import StepLoad, StepTime

ROWS = 32
WARM_UP = 8 * EXPLORATION_STEPS
STEPS = 40 * EXPLORATION_STEPS


@dataclasses.dataclass
class World:
    """Steps of `base_us` and `token_us` for each token of a padded row, and 5% of noise."""

    base_us: float
    token_us: float
    random: random.Random = dataclasses.field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        budget = ROWS * (1 + AUTO_LENGTHS[-1]) + 32
        self.buckets = Buckets.from_config(ROWS, budget, draft_lengths=AUTO_LENGTHS)
        self.step_time = StepTime(self.buckets)
        self.drafts = AdaptiveDraftLength(AUTO_LENGTHS, self.step_time)

    def us(self, num_decodes: int, width: int, prefill_tokens: int = 0) -> float:
        program = self.buckets.pick(num_decodes, prefill_tokens, width)
        return self.base_us + self.token_us * program.num_tokens

    def step(
        self, chances: dict[Sequence, Chances], prefill_tokens: int = 0
    ) -> tuple[float, float]:
        """Expected tokens and time of a step for sequences that accept with these chances."""
        self.drafts.choose([*chances], lambda: prefill_tokens)
        lengths = {seq: self.drafts.of(seq) for seq in chances}
        width = 1 + max(lengths.values())
        us = self.us(len(chances), width, prefill_tokens)
        load = StepLoad(len(chances), prefill_tokens=prefill_tokens, width=width)
        self.step_time.observe(load, round(us * self.random.uniform(0.95, 1.05)))
        for seq, length in lengths.items():
            accepted = 0
            while accepted < length and self.random.random() < chance(chances[seq], accepted):
                accepted += 1
            if length:
                self.drafts.observe(seq, length, accepted)
            seq.output_token_ids += [0] * (1 + accepted)
        return sum(expected(chances[seq], length) for seq, length in lengths.items()), us

    def goodput(self, chances: dict[Sequence, Chances], num_steps: int) -> float:
        tokens, us = map(sum, zip(*(self.step(chances) for _ in range(num_steps))))
        return tokens / us

    def best(self, chances: dict[Sequence, Chances]) -> float:
        """The goodput of the best fixed length."""
        return max(
            sum(expected(own, length) for own in chances.values())
            / self.us(len(chances), 1 + length)
            for length in AUTO_LENGTHS
        )


Chances = float | tuple[float, float]
"""That a draft is right, or the first of a step and one after a right one."""


def chance(chances: Chances, place: int) -> float:
    return chances[place > 0] if isinstance(chances, tuple) else chances


def expected(chances: Chances, length: int) -> float:
    right = [chance(chances, place) for place in range(length)]
    return sum(math.prod(right[:place]) for place in range(length + 1))


def sequences(count: int) -> list[Sequence]:
    return [
        Sequence(i, str(i), 0, [1], SamplingParams(), 0, num_speculative_tokens=AUTO_LENGTHS[-1])
        for i in range(count)
    ]


MEMORY_BOUND, COMPUTE_BOUND = (20_000, 100), (1_000, 1_000)
SMOLLM2 = 36_000, 3_900
"""About as on two CPU cores."""


@pytest.mark.parametrize(
    ("world", "count", "chances", "length"),
    [
        (SMOLLM2, 1, (0.3, 0.95), 7),
        (MEMORY_BOUND, 1, 1.0, 7),
        (MEMORY_BOUND, 32, 1.0, 7),
        (MEMORY_BOUND, 1, 0.0, 0),
        (COMPUTE_BOUND, 32, 0.5, 0),
        (COMPUTE_BOUND, 1, 1.0, 7),
    ],
)
def test_the_length_is_that_of_the_best_goodput(world, count, chances, length):
    """Of drafts that are right in runs too: one probability for all drafts would say 3."""
    world, seqs = World(*world), sequences(count)
    for _ in range(WARM_UP + EXPLORATION_STEPS // 2):
        world.step(dict.fromkeys(seqs, chances))
    assert {world.drafts.of(seq) for seq in seqs} == {length}


@pytest.mark.parametrize("world", [MEMORY_BOUND, COMPUTE_BOUND], ids=["memory", "compute"])
def test_every_phase_of_a_load_is_served_about_as_well_as_by_its_best_length(world):
    """From one stream to 32 and back, of text that is easy to guess or hard, one after another."""
    world = World(*world)
    for count, each in [(1, 0.9), (32, 0.9), (32, 0.05), (1, 0.05), (1, 0.9), (8, 0.5)]:
        chances = dict.fromkeys(sequences(count), each)
        world.goodput(chances, WARM_UP)
        assert world.goodput(chances, STEPS) > 0.9 * world.best(chances), (count, each)


@pytest.mark.parametrize("chances", [(0.2, 0.8), (0.6, 0.9)])
@pytest.mark.parametrize("count", [1, 32])
def test_little_is_lost_before_times_and_acceptance_are_known(count, chances):
    """Lengths are tried from the shortest up, as long as they may pay."""
    world = World(*SMOLLM2)
    own = dict.fromkeys(sequences(count), chances)
    assert world.goodput(own, 60) > 0.85 * world.best(own)


def test_drafts_of_a_step_with_prompts_pay_for_themselves():
    """Such a step has rows for all sequences: two of them draft in it where a token of a row costs
    next to nothing, and otherwise in steps of decodes alone."""
    for times, beside in (((20_000, 20), 7), (SMOLLM2, 0)):
        world, seqs = World(*times), sequences(2)
        lengths: dict[int, list[int]] = {0: [], 32: []}
        for number in range(40 * EXPLORATION_STEPS):
            prefill_tokens = 0 if number % 3 else 32
            world.step(dict.fromkeys(seqs, 0.95), prefill_tokens)
            lengths[prefill_tokens].append(world.drafts.of(seqs[0]))
        late = [median(each[len(each) // 2 :]) for each in lengths.values()]
        assert late == [7, beside], times


def test_a_sequence_that_accepts_nothing_is_drafted_for_only_in_trials():
    world, seqs = World(*MEMORY_BOUND), sequences(4)
    chances = dict(zip(seqs, (0.9, 0.9, 0.9, 0.0)))
    world.goodput(chances, WARM_UP)
    drafted = [0] * len(seqs)
    for _ in range(STEPS):
        world.step(chances)
        for place, seq in enumerate(seqs):
            drafted[place] += world.drafts.of(seq) > 0
    assert min(drafted[:3]) > 0.9 * STEPS
    assert 0 < drafted[3] <= 1.5 * STEPS / EXPLORATION_STEPS


def test_the_same_tokens_and_times_give_the_same_lengths():
    worlds = [World(*MEMORY_BOUND), World(*MEMORY_BOUND)]
    seqs = [sequences(3), sequences(3)]
    for _ in range(STEPS):
        for world, own in zip(worlds, seqs):
            world.step(dict(zip(own, (0.2, 0.6, 0.8))))
        chosen = [[world.drafts.of(seq) for seq in own] for world, own in zip(worlds, seqs)]
        assert chosen[0] == chosen[1]
