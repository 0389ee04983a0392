"""A server's life: the port first, then the engine, then requests until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn

from jaxserve.async_engine import AsyncEngine
from jaxserve.engine.checkpoint import discard
from jaxserve.errors import ConfigError
from jaxserve.resume import STOPPED
from jaxserve.server.app import AppSettings, create_app
from jaxserve.server.service import Service

MAX_HEADER_BYTES = 1 << 16
MAX_CONNECTIONS = 4096
LAST_WORDS_S = 5
"""How long clients have to read their last bytes."""

CHECKPOINT_S = 8
"""How long KV is added to a checkpoint: with the grace, less than Kubernetes' half a minute."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_log = logging.getLogger("jaxserve.server")


@dataclasses.dataclass(frozen=True)
class Stopping:
    """What is done when the server is told to stop.

    Attributes:
        grace_s: how long requests under way have to end.
        checkpoint_dir: where those that have not ended are written down, to be taken up by the
            next server; without one they are aborted.
    """

    grace_s: float
    checkpoint_dir: Path | None


def listen(host: str, port: int) -> socket.socket:
    """A socket for a server. Raises ConfigError when there is no such address, or it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"host {host!r} and port {port}: {error}; give others.") from None
    return listener


async def serve(
    service: Service,
    settings: AppSettings,
    listener: socket.socket,
    load: Callable[[], AsyncEngine],
    stopping: Stopping,
) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit status.

    Answers at once, with 503 until `load`, which runs in a thread of its own, returns the engine.
    Told to stop, it takes no more requests and gives those under way their time. Being told again
    ends that at once. An engine that fails ends the server with status 1, for whoever watches over
    it to start another. Raises what `load` raises.
    """
    server = _Server(
        uvicorn.Config(
            create_app(service, settings),
            http="h11",
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_graceful_shutdown=LAST_WORDS_S,
        )
    )
    stop = _Stop()
    _log.info("listening on http://%s:%d", *listener.getsockname()[:2])
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        engine = await _loaded(load, stop)
    except BaseException:
        server.should_exit = True
        await serving
        raise
    try:
        await service.begin(engine, stopping.checkpoint_dir)
        _log.info("ready")
        told = asyncio.create_task(stop.told.wait())
        ended = asyncio.wrap_future(engine.ended)
        await asyncio.wait({told, ended, serving}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        status = await _drain(service, engine, stop, stopping) if stop.told.is_set() else 1
        if engine.failure is None:
            return status
        _log.error("the engine has failed", exc_info=engine.failure)
        return 1
    finally:
        server.should_exit = True
        try:
            await serving
        finally:
            await asyncio.to_thread(engine.close)


async def _loaded(load: Callable[[], AsyncEngine], stop: _Stop) -> AsyncEngine:
    """The engine. A process told to stop meanwhile ends here: there is nothing to lose, and no way
    to call back the threads that compile."""
    loop = asyncio.get_running_loop()
    loading: asyncio.Future[AsyncEngine] = loop.create_future()

    def run() -> None:
        try:
            result, settle = load(), loading.set_result
        except BaseException as error:
            result, settle = error, loading.set_exception
        loop.call_soon_threadsafe(settle, result)

    threading.Thread(target=run, name="jaxserve-load", daemon=True).start()
    told = asyncio.create_task(stop.told.wait())
    await asyncio.wait({loading, told}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        os._exit(128 + stop.first)
    told.cancel()
    return loading.result()


async def _drain(service: Service, engine: AsyncEngine, stop: _Stop, stopping: Stopping) -> int:
    """Let requests end, and return the exit status."""
    _log.info("stopping: %d sequences have %g s", service.num_sequences, stopping.grace_s)
    draining = asyncio.create_task(service.drain(stopping.grace_s))
    told_again = asyncio.create_task(stop.told_again.wait())
    await asyncio.wait({draining, told_again}, return_when=asyncio.FIRST_COMPLETED)
    told_again.cancel()
    if draining.done() and draining.result() and not service.holds_unclaimed:
        if stopping.checkpoint_dir is not None and engine.failure is None:
            discard(stopping.checkpoint_dir)
        return 0
    draining.cancel()
    status = 0
    if stopping.checkpoint_dir is not None and engine.failure is None:
        await engine.checkpoint(stopping.checkpoint_dir, deadline_s=CHECKPOINT_S)
        status = STOPPED
        _log.info("written to %s, for the next server to take up", stopping.checkpoint_dir)
    await service.abort_all()
    await service.drain(LAST_WORDS_S)
    return status


class _Stop:
    """SIGTERM and SIGINT: `told`, and `told_again`."""

    def __init__(self) -> None:
        self.told = asyncio.Event()
        self.told_again = asyncio.Event()
        self.first = 0
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._tell, number)

    def _tell(self, number: int) -> None:
        self.first = self.first or number
        (self.told_again if self.told.is_set() else self.told).set()


class _Server(uvicorn.Server):
    """uvicorn without its own handling of signals, which would not wait for requests to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
