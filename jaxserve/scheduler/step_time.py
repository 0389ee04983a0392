"""Step time predictor, fitted online to observed steps.

The predictor of Medha (Agrawal et al. 2024) and Vidur, adapted to compiled programs: a step has the
fixed cost of its program plus the cost of its attention,

    us = program + us_per_context * decode contexts + us_per_pair * prefill pairs

where the contexts are tokens that decodes attend to, and pairs are (prefilled query, visible key)
pairs. There is no clock: callers measure and report the times.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Self

from jaxserve.core.steps.buckets import Buckets, ProgramKey, StepShape
from jaxserve.core.steps.plan import StepPlan
from jaxserve.core.steps.work import causal_pairs

HORIZON = 32
"""Forgetting horizon in steps: one this many steps old weighs 1/e of the latest."""

OUTLIER_FACTOR = 2
"""Outlier limit: a step is clipped to this many times slower or faster than predicted."""


class StepLoad(NamedTuple):
    """The quantities that determine the time of a step, or of a dispatch of several."""

    num_decodes: int = 0
    context_tokens: int = 0
    prefill_tokens: int = 0
    num_pairs: int = 0
    lone_stop: int = 0
    """As of StepShape."""
    width: int = 1

    @classmethod
    def of(cls, plan: StepPlan) -> Self:
        contexts = sum(chunk.start + 1 for chunk in plan.decodes)
        load = cls(len(plan.decodes), contexts, width=plan.width)
        for chunk in plan.prefills:
            load = load.plus(chunk.start, chunk.num_tokens, scored=chunk.scored)
        return load

    @classmethod
    def together(cls, loads: Iterable[Self]) -> Self:
        """The load of a dispatch in which each pipeline stage runs one of these steps: all stages
        wait for the slowest, so the maximum of each field."""
        return cls(*map(max, zip(*loads)))

    @property
    def shape(self) -> StepShape:
        return StepShape(self.num_decodes, self.prefill_tokens, self.lone_stop, self.width)

    def plus(
        self, start: int, num_tokens: int, *, scored: bool = False, extends: bool = False
    ) -> Self:
        """Adds a prefill chunk of positions `start .. start + num_tokens - 1`; if it `extends` the
        last chunk, these positions are appended to that one."""
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

    The two slopes are shared by all programs and fitted by least squares over the differences
    between steps of one program (a regression with fixed effects): each observation counts by its
    deviation from its program's means. The fit minimises relative errors, with exponential
    forgetting, both slopes at least 0. The rest of a program's mean is its fixed cost.

    - Steps that are nearly alike say little about the slopes, and their noise misleads. So a slope
      is regularized towards its last value with as much weight as if the whole load were deviation;
      it starts at 0, where a step costs only its program's fixed cost.
    - The first step of a program may include page faults: it counts only until there is a second.
      A stall counts as `OUTLIER_FACTOR` times the prediction.
    - If the machine slows down, old and new data conflict. So each observation first scales all
      data part of the way to the speed just seen.
    - A program never run is assumed to cost as much per token as the next smaller one, or to lie on
      the line through the two next smaller ones if that is less, and no more than any larger one.
      So programs are tried from the smallest upwards. Steps with prefill are compared among
      themselves, and so are decode-only steps.
    """

    def __init__(self, buckets: Buckets, num_stages: int = 1) -> None:
        """`num_stages`: pipeline stages, each of which runs one step of a dispatch."""
        self._buckets = buckets
        self._in_flight: deque[StepLoad] = deque(maxlen=num_stages - 1)
        self._programs: dict[ProgramKey, _Program] = {}
        self.us_per_context = self.us_per_pair = 0.0
        # Sums over observations of products of two deviations, relative to the step's time.
        self._cc = self._pp = self._cp = self._cu = self._pu = 0.0
        # Sums over observations of squared loads, relative to the step's time.
        self._contexts = self._pairs = 0.0

    def dispatched(self, load: StepLoad) -> None:
        """Records the load (or an empty one) that enters the first stage: steps predicted from now
        on follow it through the pipeline."""
        self._in_flight.append(load)

    def observe(self, load: StepLoad, us: int) -> None:
        """Records that a dispatch of this load took `us`. Raises ProgramMissError when no program
        fits it."""
        key = self.program(load)
        program = self._programs.get(key)
        us = max(us, 1)
        if program is None:
            bound = self._predict(load)
            us = us if bound is None else min(us, OUTLIER_FACTOR * bound)
            self._programs[key] = _Program(us, load.context_tokens, load.num_pairs)
            return
        program.num_steps += 1
        if program.num_steps == 2:
            program.us = min(us, OUTLIER_FACTOR * program.us)
            program.context_tokens, program.num_pairs = load.context_tokens, load.num_pairs
            return
        expected = max(1.0, self._cost_us(program) + self._attention_us(load))
        us = min(max(us, expected / OUTLIER_FACTOR), expected * OUTLIER_FACTOR)
        self._rescale((us / expected) ** (1 / HORIZON))
        self._learn(program, load, us)

    def predict(self, load: StepLoad) -> int | None:
        """Predicted microseconds of the dispatch of this step, with the steps in flight in the
        pipeline: 0 if there is no work, None while no step of its kind was observed. Raises
        ProgramMissError when no program fits it."""
        return self._predict(StepLoad.together([load, *self._in_flight]))

    def program(self, load: StepLoad) -> ProgramKey:
        """The program of a step. Raises ProgramMissError when none fits it."""
        return self._buckets.program([load.shape])

    def observed(self, load: StepLoad) -> bool:
        """Whether a step of the same program was observed."""
        return self.program(load) in self._programs

    def _predict(self, load: StepLoad) -> int | None:
        if load == StepLoad():
            return 0
        key = self.program(load)
        program = self._programs.get(key)
        cost_us = self._unseen_us(key) if program is None else self._cost_us(program)
        return None if cost_us is None else max(1, round(cost_us + self._attention_us(load)))

    def prefill_us(self, start: int, stop: int) -> int | None:
        """The least predicted time to prefill positions `start .. stop - 1` in steps without other
        work; None while no step with prefill was observed."""
        rates = [
            self._cost_us(program) / key.num_tokens
            for key, program in self._programs.items()
            if key.prefill_tokens
        ]
        if not rates:
            return None
        return round(min(rates) * (stop - start) + self.us_per_pair * causal_pairs(start, stop))

    def _unseen_us(self, key: ProgramKey) -> float | None:
        """Estimated fixed cost of a program that never ran; None without a comparable program."""
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
        """The fixed cost of a program, without attention."""
        context_us = self.us_per_context * program.context_tokens
        return max(0.0, program.us - context_us - self.us_per_pair * program.num_pairs)

    def _rescale(self, slower: float) -> None:
        """Rescales data and estimates to a machine that is `slower` times as slow."""
        for program in self._programs.values():
            program.us *= slower
        self.us_per_context *= slower
        self.us_per_pair *= slower
        self._cu, self._pu = self._cu / slower, self._pu / slower
        square = slower * slower
        self._cc, self._pp, self._cp = self._cc / square, self._pp / square, self._cp / square
        self._contexts, self._pairs = self._contexts / square, self._pairs / square

    def _learn(self, program: _Program, load: StepLoad, us: float) -> None:
        weight = max(1 / HORIZON, 1 / (program.num_steps - 1))
        c = load.context_tokens - program.context_tokens
        p = load.num_pairs - program.num_pairs
        u = us - program.us
        program.us += weight * u
        program.context_tokens += weight * c
        program.num_pairs += weight * p
        kept, weight = 1 - 1 / HORIZON, (1 - weight) / (us * us)
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
