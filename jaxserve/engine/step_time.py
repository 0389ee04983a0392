"""How long a step will take, learnt from the steps that ran.

The predictor of Medha (Agrawal et al. 2024) and Vidur in a world of compiled programs: a step costs
what its program costs whatever is in it, and what its attention reads besides,

    us = program + us_per_context * decode contexts + us_per_pair * prefill pairs

where the contexts are tokens that decodes attend to, and pairs are those of a prefilled query and a
key that it sees. It has no clock: times are measured by whoever reports them.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Self

from jaxserve.engine.plan import StepPlan
from jaxserve.kv.rates import causal_pairs
from jaxserve.runtime.buckets import Buckets, ProgramKey, StepShape

MEMORY = 32
"""Steps that an estimate rests on: one so many steps old weighs 1/e of the latest."""

SURPRISE = 2
"""A step counts as at most so many times slower or faster than predicted."""


class StepLoad(NamedTuple):
    """What the time of a step, or of a dispatch of several, depends on."""

    num_decodes: int = 0
    context_tokens: int = 0
    prefill_tokens: int = 0
    num_pairs: int = 0
    lone_stop: int = 0
    """As of StepShape."""

    @classmethod
    def of(cls, plan: StepPlan) -> Self:
        load = cls(len(plan.decodes), sum(chunk.start + 1 for chunk in plan.decodes))
        for chunk in plan.prefills:
            load = load.plus(chunk.start, chunk.num_tokens, scored=chunk.scored)
        return load

    @classmethod
    def together(cls, loads: Iterable[Self]) -> Self:
        """Of a dispatch in which each stage of a pipeline works on one of these steps: all wait for
        the slowest, so the most of everything."""
        return cls(*map(max, zip(*loads)))

    @property
    def shape(self) -> StepShape:
        return StepShape(self.num_decodes, self.prefill_tokens, self.lone_stop)

    def plus(
        self, start: int, num_tokens: int, *, scored: bool = False, extends: bool = False
    ) -> Self:
        """With one more prefill chunk, of positions `start .. start + num_tokens - 1`; or, if it
        `extends` the last one, with that longer by these."""
        stop = start + num_tokens
        shape = self.shape.plus(stop, num_tokens, scored=scored, extends=extends)
        return self._replace(
            prefill_tokens=shape.prefill_tokens,
            num_pairs=self.num_pairs + causal_pairs(start, stop),
            lone_stop=shape.lone_stop,
        )


@dataclasses.dataclass(slots=True)
class _Program:
    """Means over a program's latest steps."""

    us: float
    context_tokens: float
    num_pairs: float
    num_steps: int = 1


class StepTime:
    """Predicts steps from those observed.

    The two slopes are shared by all programs and fitted by least squares over what differs between
    steps of one program (a regression with fixed effects): each observation counts by how far it
    is from its program's means. Relative errors are what is minimised, with exponential forgetting,
    both slopes at least 0. What is left of a program's mean is its own cost.

    - Steps that are nearly alike say little of the slopes, and their noise much that is wrong. So a
      slope is drawn to its last value with as much weight as if all that was read were deviation;
      at first it is 0, and a program's cost is all there is.
    - A program seen for the first time may have paged something in: its first step counts until
      there is a second. A stall counts as `SURPRISE` times the prediction.
    - A machine that slows down would leave old and new data in conflict, so all that is known is
      first scaled some way towards the speed just seen.
    - A program never run is taken to cost as much for a token as the one below it, or to lie on the
      line through the two below it if that is less, and no more than any larger one. So programs
      are tried from the smallest upwards. Steps that prefill are compared among themselves, and so
      are those that only decode.
    """

    def __init__(self, buckets: Buckets, num_stages: int = 1) -> None:
        """`num_stages`: steps that a dispatch works on at once."""
        self._buckets = buckets
        self._in_flight: deque[StepLoad] = deque(maxlen=num_stages - 1)
        self._programs: dict[ProgramKey, _Program] = {}
        self.us_per_context = self.us_per_pair = 0.0
        # Sums over observations, of products of two deviations, in units of the step's time.
        self._cc = self._pp = self._cp = self._cu = self._pu = 0.0
        # And of squares of what there was, deviation or not.
        self._contexts = self._pairs = 0.0

    def dispatched(self, load: StepLoad) -> None:
        """Takes a step, or none, as the one that enters the first stage: steps predicted from now
        on go through the pipeline behind it."""
        self._in_flight.append(load)

    def observe(self, load: StepLoad, us: int) -> None:
        """Learns that a dispatch of this load took `us`. Raises ProgramMissError when no program
        holds it."""
        key = self._buckets.program([load.shape])
        program = self._programs.get(key)
        us = max(us, 1)
        if program is None:
            bound = self._predict(load)
            us = us if bound is None else min(us, SURPRISE * bound)
            self._programs[key] = _Program(us, load.context_tokens, load.num_pairs)
            return
        program.num_steps += 1
        if program.num_steps == 2:
            program.us = min(us, SURPRISE * program.us)
            program.context_tokens, program.num_pairs = load.context_tokens, load.num_pairs
            return
        expected = max(1.0, self._cost_us(program) + self._attention_us(load))
        us = min(max(us, expected / SURPRISE), expected * SURPRISE)
        self._rescale((us / expected) ** (1 / MEMORY))
        self._learn(program, load, us)

    def predict(self, load: StepLoad) -> int | None:
        """The microseconds that the dispatch should take which a step enters by, with those that
        are in flight: 0 if there is nothing to do, None while no step of its kind was observed.
        Raises ProgramMissError when no program holds it."""
        return self._predict(StepLoad.together([load, *self._in_flight]))

    def _predict(self, load: StepLoad) -> int | None:
        if load == StepLoad():
            return 0
        key = self._buckets.program([load.shape])
        program = self._programs.get(key)
        cost_us = self._unseen_us(key) if program is None else self._cost_us(program)
        return None if cost_us is None else max(1, round(cost_us + self._attention_us(load)))

    def prefill_us(self, start: int, stop: int) -> int | None:
        """The least time to prefill positions `start .. stop - 1` in steps with nothing else; None
        while no step that prefills was observed."""
        rates = [
            self._cost_us(program) / key.num_tokens
            for key, program in self._programs.items()
            if key.prefill_tokens
        ]
        if not rates:
            return None
        return round(min(rates) * (stop - start) + self.us_per_pair * causal_pairs(start, stop))

    def _unseen_us(self, key: ProgramKey) -> float | None:
        """What a program never run should cost without its attention."""
        known = sorted(
            (other.num_tokens, self._cost_us(program))
            for other, program in self._programs.items()
            if bool(other.prefill_tokens) == bool(key.prefill_tokens)
        )
        guesses = [us for tokens, us in known if tokens > key.num_tokens]
        smaller = [size for size in known if size[0] <= key.num_tokens]
        if smaller:
            tokens, us = smaller[-1]
            more = key.num_tokens - tokens
            guesses.append(us + us / tokens * more)
            for least_tokens, least_us in smaller[-2:-1]:
                if least_tokens < tokens:
                    rise = max(0.0, us - least_us) / (tokens - least_tokens)
                    guesses.append(us + rise * more)
        return min(guesses, default=None)

    def _attention_us(self, load: StepLoad) -> float:
        return self.us_per_context * load.context_tokens + self.us_per_pair * load.num_pairs

    def _cost_us(self, program: _Program) -> float:
        """What a program costs without its attention."""
        context_us = self.us_per_context * program.context_tokens
        return max(0.0, program.us - context_us - self.us_per_pair * program.num_pairs)

    def _rescale(self, slower: float) -> None:
        """Takes all that is known as if it had been seen on a machine `slower` times as slow."""
        for program in self._programs.values():
            program.us *= slower
        self.us_per_context *= slower
        self.us_per_pair *= slower
        self._cu, self._pu = self._cu / slower, self._pu / slower
        square = slower * slower
        self._cc, self._pp, self._cp = self._cc / square, self._pp / square, self._cp / square
        self._contexts, self._pairs = self._contexts / square, self._pairs / square

    def _learn(self, program: _Program, load: StepLoad, us: float) -> None:
        weight = max(1 / MEMORY, 1 / (program.num_steps - 1))
        c = load.context_tokens - program.context_tokens
        p = load.num_pairs - program.num_pairs
        u = us - program.us
        program.us += weight * u
        program.context_tokens += weight * c
        program.num_pairs += weight * p
        kept, weight = 1 - 1 / MEMORY, (1 - weight) / (us * us)
        self._cc = kept * self._cc + weight * c * c
        self._pp = kept * self._pp + weight * p * p
        self._cp = kept * self._cp + weight * c * p
        self._cu = kept * self._cu + weight * c * u
        self._pu = kept * self._pu + weight * p * u
        self._contexts = kept * self._contexts + (load.context_tokens / us) ** 2
        self._pairs = kept * self._pairs + (load.num_pairs / us) ** 2
        if self._contexts:
            rest = self._cu - self._cp * self.us_per_pair + self._contexts * self.us_per_context
            self.us_per_context = max(0.0, rest / (self._cc + self._contexts))
        if self._pairs:
            rest = self._pu - self._cp * self.us_per_context + self._pairs * self.us_per_pair
            self.us_per_pair = max(0.0, rest / (self._pp + self._pairs))
