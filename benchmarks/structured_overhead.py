"""Overhead of a grammar in a decode step: the same batch with one and without, in the same run.

    python benchmarks/structured_overhead.py [MODEL] [--batch 32]

No grammar here ever ends, so that every row decodes in every step. Sampled rows use the same
programs with and without a grammar; greedy rows without one have a separate program, which is
faster. Rounds of all cases alternate, and the best of each is reported: other programs may run on
the machine too, which affects the processor time of this one less.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
from table import print_table

from jaxserve import LLM, SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.runtime import grammar_masks
from jaxserve.structured.matcher import Matcher

ROUNDS = 3
STEPS = 16
WARM_TOKENS = 4
PROMPT_TOKENS = 16
MAX_MODEL_LEN = 128

FORMS = {
    "JSON schema": {
        "json": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "tags": {"type": "array", "items": {"type": "string", "maxLength": 200}},
                },
                "required": ["name", "tags"],
                "additionalProperties": False,
            },
            "minItems": 1000,
        }
    },
    "regex": {"regex": r"([A-Z][a-z ,]*[.] )+"},
    "counting regex": {"regex": r"[A-Za-z ,.]{4000}"},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Params that all rows have, and the case that they are compared with."""

    name: str
    params: SamplingParams
    base: str


class Round(NamedTuple):
    """Microseconds of a step: of the clock; of those, what the host worked on masks, its wait for
    the tokens before left out; and of all processors."""

    step_us: float
    masks_us: float
    processor_us: float


def cases() -> list[Case]:
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=None, ignore_eos=True)
    greedy = dataclasses.replace(sampled, temperature=0.0)
    formed = {name: {"structured_outputs": form} for name, form in FORMS.items()}
    return [
        Case("no form", sampled, "no form"),
        *(
            Case(name, dataclasses.replace(sampled, **form), "no form")
            for name, form in formed.items()
        ),
        Case("no form, greedy", greedy, "no form, greedy"),
        Case(
            "JSON schema, greedy",
            dataclasses.replace(greedy, **formed["JSON schema"]),
            "no form, greedy",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    named = {} if options.model is None else {"model": options.model}
    settings = {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": options.batch,
        "max_num_batched_tokens": options.batch + 256,
    }
    rounds: dict[str, list[Round]] = {case.name: [] for case in cases()}
    with LLM(**named, **settings) as llm:
        for _ in range(ROUNDS):
            for case in cases():
                rounds[case.name].append(decode(llm.engine, case.params, options.batch))
    best = {name: Round(*map(min, zip(*measured))) for name, measured in rounds.items()}
    rows = []
    for case in cases():
        own, base = best[case.name], best[case.base]
        ms = (us / 1e3 for us in (own.step_us, own.masks_us, own.processor_us))
        step, processor = own.step_us / base.step_us, own.processor_us / base.processor_us
        rows.append((case.name, *ms, f"{step:.3f}", f"{processor:.3f}"))
    print_table(
        f"{options.batch} rows, {STEPS} steps, best of {ROUNDS}, on {jax.devices()[0]}",
        ("all rows", "step, ms", "masks, ms", "processor, ms", "step, ratio", "processor, ratio"),
        rows,
    )


def decode(engine: Engine, params: SamplingParams, batch: int) -> Round:
    """Steps in which all rows decode."""
    prompts = ([*range(100, 100 + PROMPT_TOKENS), 1000 + row] for row in range(batch))
    added = [engine.add(f"row-{row}", prompt, params) for row, prompt in enumerate(prompts)]
    sequence_outputs = [request.sequence_outputs[0] for request in added]
    while any(
        len(generation.seq.output_token_ids) < WARM_TOKENS for generation in sequence_outputs
    ):
        engine.step()
    with timed_masks() as worked_us:
        begin, begin_processor = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            engine.step()
        step_times_us = (time.perf_counter() - begin) * 1e6
        processor_us = (time.process_time() - begin_processor) * 1e6
    if not all(request.sequence_outputs[0].seq.finish_reason is None for request in added):
        raise SystemExit("a form ended: the cases are not alike")
    for request in added:
        engine.abort(request.request_id)
    while engine.has_work:
        engine.step()
    engine.reset_prefix_cache()
    return Round(step_times_us / STEPS, sum(worked_us) / STEPS, processor_us / STEPS)


@contextlib.contextmanager
def timed_masks() -> Iterator[list[float]]:
    """What each call that has matchers advance takes, once their tokens are there."""
    worked_us: list[float] = []
    advance = grammar_masks.advance

    def timed(taken: Iterable[tuple[Matcher, int, int]]) -> None:
        taken = list(taken)
        begin = time.perf_counter()
        advance(taken)
        worked_us.append((time.perf_counter() - begin) * 1e6)

    grammar_masks.advance = timed
    try:
        yield worked_us
    finally:
        grammar_masks.advance = advance


if __name__ == "__main__":
    main()
