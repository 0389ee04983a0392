"""Compile grammars of upcoming prompts in the background while earlier prompts run."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from jaxserve.core.errors import RequestError
from jaxserve.offline.windows import BatchPrompt

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine
    from jaxserve.structured.grammar import Grammar

AHEAD = 16
"""Prompts whose grammars are compiled ahead. Below the engine's limit of waiting grammars, and
small, since every line of a job may have its own large grammar."""


def with_grammars(
    engine: Engine, prompts: Iterable[BatchPrompt]
) -> Iterator[tuple[BatchPrompt, Future[Grammar] | None]]:
    """Prompts in order, each with a future of its grammar, if it has one. The future raises what
    `Engine.preparation` raises."""
    ahead: collections.deque[tuple[BatchPrompt, Future[Grammar] | None]] = collections.deque()
    for prompt in prompts:
        ahead.append((prompt, _begin(engine, prompt)))
        if len(ahead) > AHEAD:
            yield ahead.popleft()
    yield from ahead


def _begin(engine: Engine, prompt: BatchPrompt) -> Future[Grammar] | None:
    try:
        return engine.preparation(prompt.params)
    except RequestError as error:
        refusal: Future[Grammar] = Future()
        refusal.set_exception(error)
        return refusal
