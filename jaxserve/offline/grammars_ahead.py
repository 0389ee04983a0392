"""Prompts with their grammars, which are compiled while the prompts before them run."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from jaxserve.errors import RequestError
from jaxserve.offline.windows import Prompt

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine
    from jaxserve.structured.grammar import Grammar

AHEAD = 16
"""Prompts whose grammars are compiled or wait for it. Fewer than an engine has wait at once; and
few, for a job may have a grammar in each line, and they are large."""


def with_grammars(
    engine: Engine, prompts: Iterable[Prompt]
) -> Iterator[tuple[Prompt, Future[Grammar] | None]]:
    """Prompts in their order, each with its grammar to be, if it wants one. The future raises what
    `Engine.prepare` raises."""
    ahead: collections.deque[tuple[Prompt, Future[Grammar] | None]] = collections.deque()
    for prompt in prompts:
        ahead.append((prompt, _begin(engine, prompt)))
        if len(ahead) > AHEAD:
            yield ahead.popleft()
    yield from ahead


def _begin(engine: Engine, prompt: Prompt) -> Future[Grammar] | None:
    try:
        return engine.preparation(prompt.request.params(prompt.place))
    except RequestError as error:
        refusal: Future[Grammar] = Future()
        refusal.set_exception(error)
        return refusal
