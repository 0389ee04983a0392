"""Tiny engines with a debugged KV manager, and ways to look at what it did and to disturb it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from tiny_engines import PAGE_SIZE, TinyModel, generate

from jaxserve.core.events import Dispatched
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence
from jaxserve.engine.engine import Engine
from jaxserve.llm import LLM
from jaxserve.sampling.speculation import NO_DRAFT

STEPS_TO_SETTLE = 500


def bytes_of(model: TinyModel, num_pages: int) -> int:
    """Bytes of so many pages of an engine of `TinyModel.load`."""
    return num_pages * model.token_bytes * PAGE_SIZE


def count(engine: Engine, name: str, label: str | None = None) -> float:
    """The value of one of the engine's own metrics, 0 for a label not yet seen."""
    value = engine.get_metrics()[f"jaxserve:{name}"].value
    return value if label is None else value.get(label, 0)


def prefilled(engine: Engine, work: Callable[[], Any]) -> tuple[int, Any]:
    """Prefill tokens computed by `work`, from the event log, and what it returned."""
    first = len(engine.log.records)
    result = work()
    steps = (record for record in engine.log.records[first:] if isinstance(record, Dispatched))
    return sum(step.prefill_tokens for step in steps), result


def settle(engine: Engine) -> None:
    """Lets an idle engine's moves end and be passed on, until nothing moves any more."""
    for _ in range(STEPS_TO_SETTLE):
        engine.step()
        if not engine.kv.transfers():
            return
    raise AssertionError("moves beget moves for ever")


def evict_all(engine: Engine) -> None:
    """Takes every page that no sequence uses, and lets what is worth it reach a lower tier."""
    engine.kv.evict(engine.kv.pool.capacity)
    settle(engine)


def preemptible(engine: Engine) -> list[Sequence]:
    """Running sequences that are past waiting for pages, and have something left to do."""
    return [
        seq
        for seq in engine.scheduler.running
        if not engine.kv.is_fetching(engine.scheduler.tables[seq.seq_id])
        and seq.num_computed < seq.kv_limit
    ]


class Preempter:
    """Preempts a running sequence at random after every step, or after so large a share of them,
    and takes some of the pages that no sequence uses."""

    def __init__(
        self, engine: Engine, seed: int = 0, evicts: bool = False, share: float = 1.0
    ) -> None:
        self.count = 0
        self._share = share
        self._engine = engine
        self._random = random.Random(seed)
        self._evicts = evicts

    def __call__(self) -> None:
        running = preemptible(self._engine)
        if running and self._random.random() < self._share:
            self._engine.scheduler.preempt(self._random.choice(running))
            self.count += 1
        if self._evicts:
            self._engine.kv.evict(self._random.randint(0, 6))


def first_path(drafts: np.ndarray, parents: np.ndarray | None = None) -> list[int]:
    """Of a sequence's drafts on the device the best guess, the best after that, and so on;
    `parents` are those of a tree."""
    path, node = [], 0
    while True:
        follow = np.arange(len(drafts)) == node if parents is None else parents == node
        after = np.flatnonzero(follow & (drafts != NO_DRAFT))
        if not len(after):
            return path
        path.append(int(drafts[after[0]]))
        node = after[0] + 1


class Alone:
    """What requests generate with an engine to themselves that remembers nothing."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._known: dict[str, list[tuple[int, ...]]] = {}

    def tokens(self, prompt: list[int], params: SamplingParams) -> list[tuple[int, ...]]:
        """Tokens of each sample."""
        key = repr((prompt, dataclasses.astuple(params)))
        if key not in self._known:
            self._known[key] = token_ids(generate(self._llm, prompt, params))
        return self._known[key]


def token_ids(output: Any) -> list[tuple[int, ...]]:
    """Tokens of each sample of an output."""
    return [completion.token_ids for completion in output.outputs]
