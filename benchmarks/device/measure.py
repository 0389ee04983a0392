"""Times and errors of problems, on the device that is there."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from device.problem import Arrays, Problem, Step, jitted

REPEATS = 5
REPEAT_S = 0.05
MAX_RUNS = 100
SLOW_S = 0.3


def measured(problem: Problem, seed: int) -> dict[str, Any]:
    """Error and time of a problem on data of a seed, and XLA's time or why there is none.

    Status "wrong" for an error beyond the tolerance.
    """
    found = {"seed": seed, "bytes_moved": problem.bytes_moved, "flops": problem.flops}
    carry, calls = arguments(problem, seed)

    @functools.cache
    def compiled(step):
        return jitted(step).lower(carry, calls).compile()

    run = compiled(problem.kernel)
    carry, results = run(carry, calls)
    if problem.exact:
        again, _ = arguments(problem, seed)
        exact = compiled(problem.exact)(again, calls)
        found["error"] = float(jax.jit(problem.worst)((carry, results), exact))
        found["tolerance"] = problem.tolerance
        found["status"] = "done" if found["error"] <= problem.tolerance else "wrong"
        del again, exact
    del results
    seconds, carry = seconds_a_call(run, carry, calls)
    found["us"] = 1e6 * seconds
    if problem.xla:
        try:
            run = compiled(problem.xla)
            found["xla_us"] = 1e6 * seconds_a_call(run, carry, calls)[0]
        except jax.errors.JaxRuntimeError as error:  # It may want more memory than there is.
            found["xla_why"] = str(error)
    return found


def arguments(problem: Problem, seed: int) -> tuple[Any, list[Any]]:
    """A carry, and the inputs of each call."""
    make = Arrays(seed)
    return problem.carry(make), [problem.inputs(make) for _ in range(problem.calls)]


def time_step(step: Step, calls: list[Any]) -> float:
    """Seconds of a call of a step without a carry."""
    return seconds_a_call(jitted(step).lower((), calls).compile(), (), calls)[0]


def seconds_a_call(
    run: Callable[[Any, list[Any]], tuple[Any, Any]], carry: Any, calls: list[Any]
) -> tuple[float, Any]:
    """Median time of one of the calls that a program makes, and the carry after all of them.

    Runs of the program are issued one behind the other, so that the host's part is hidden behind
    the device's. All of them fill REPEAT_S, and that REPEATS times; what takes SLOW_S is run once.
    The carry is donated.
    """

    def elapsed(runs: int) -> float:
        nonlocal carry
        begin = time.perf_counter()
        for _ in range(runs):
            carry, results = run(carry, calls)
        jax.block_until_ready((carry, results))
        return (time.perf_counter() - begin) / runs

    elapsed(1)
    once = elapsed(1)
    if once > SLOW_S:
        return once / len(calls), carry
    runs = int(np.clip(REPEAT_S / once, 1, MAX_RUNS))
    return statistics.median(elapsed(runs) for _ in range(REPEATS)) / len(calls), carry
