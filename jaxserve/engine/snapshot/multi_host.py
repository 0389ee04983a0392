"""What the hosts of an engine do together when they write or read a snapshot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from jaxserve.core.errors import OverloadedError, SnapshotError
from jaxserve.engine.engine_core import EngineCore

if TYPE_CHECKING:
    from jaxserve.engine.replication.core import ReplicatedCore

_T = TypeVar("_T")


class OneHost:
    """What `ReplicatedCore` has for what all hosts do together, where there is one host."""

    leads = True

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def jointly(self, action: list[Any], run: Callable[[int], _T]) -> _T:
        return run(self._core.log.now())

    def agreed(self, value: Any) -> list[Any]:
        return [value]

    def bounded(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@contextlib.contextmanager
def agreeing(hosts: OneHost | ReplicatedCore) -> Iterator[None]:
    """If the block raises SnapshotError or OverloadedError on one host, all hosts raise one."""
    failure: SnapshotError | OverloadedError | None = None
    try:
        yield
    except (SnapshotError, OverloadedError) as error:
        failure = error
    said = hosts.agreed(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    for host, message in enumerate(said):
        if message is not None:
            raise SnapshotError(f"on host {host}: {message}")
