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


class SingleHost:
    """What `ReplicatedCore` has for what all hosts do together, where there is one host."""

    leads = True

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def collectively(self, action: list[Any], run: Callable[[int], _T]) -> _T:
        return run(self._core.log.now())

    def all_gather(self, value: Any) -> list[Any]:
        return [value]

    def with_timeout(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@contextlib.contextmanager
def raise_on_all_hosts(hosts: SingleHost | ReplicatedCore) -> Iterator[None]:
    """If the block raises SnapshotError or OverloadedError on one host, all hosts raise one."""
    failure: SnapshotError | OverloadedError | None = None
    try:
        yield
    except (SnapshotError, OverloadedError) as error:
        failure = error
    said = hosts.all_gather(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    for host, message in enumerate(said):
        if message is not None:
            raise SnapshotError(f"on host {host}: {message}")
