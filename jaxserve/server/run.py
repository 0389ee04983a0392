"""Server lifecycle: load the engine, serve requests until shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import functools
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import uvicorn
from starlette.types import ASGIApp

from jaxserve.core.errors import EngineClosedError, SnapshotError
from jaxserve.core.process.signals import STOPPED
from jaxserve.engine.client import EngineClient
from jaxserve.engine.snapshot.files import discard
from jaxserve.server.app import AppSettings, create_app
from jaxserve.server.http.connections import ConnectionLimits, HttpConnection
from jaxserve.server.http.listening import Tls, address_of
from jaxserve.server.http.middleware import MAX_HEADER_BYTES
from jaxserve.server.service import Service

FLUSH_TIMEOUT_S = 5
"""How long clients have to read the rest of their responses."""

CLOSE_S = 10
"""How long the step in progress has to end, after its requests."""

SNAPSHOT_S = 8
"""Time limit for writing KV to a snapshot: with shutdown_timeout, below Kubernetes' 30 s."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_log = logging.getLogger("jaxserve.server")


@dataclasses.dataclass(frozen=True)
class Stopping:
    """What the server does at shutdown.

    Attributes:
        shutdown_timeout: seconds that requests in flight get to finish.
        snapshot_dir: where a snapshot of unfinished requests is written, to be resumed by the next
            server; without one they are aborted.
    """

    shutdown_timeout: float
    snapshot_dir: Path | None


async def serve(
    service: Service,
    settings: AppSettings,
    listener: socket.socket,
    load: Callable[[], EngineClient],
    stopping: Stopping,
    tls: Tls | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit status.

    If threads still prepare requests by then, the process exits here: they cannot be stopped, and
    Python would wait for them.

    Returns 503 until `load`, which runs in its own thread, returns the engine. The first signal
    stops admission and drains requests in flight; a second one stops the drain, and a third one
    exits at once. If the engine fails, or hangs in a step, the server exits with status 1, for a
    supervisor to restart it. Raises what `load` raises.
    """
    status = await _serve(service, settings, listener, load, stopping, tls)
    if service.preparing:
        _exit(status)
    return status


def http_server(app: ASGIApp, limits: ConnectionLimits, tls: Tls | None = None) -> uvicorn.Server:
    """A server of the application, to be started with a socket of `listen`."""
    return _Server(
        uvicorn.Config(
            app,
            http=functools.partial(HttpConnection, limits),
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            server_header=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_graceful_shutdown=FLUSH_TIMEOUT_S,
            **({} if tls is None else tls.uvicorn_settings),
        )
    )


async def _serve(
    service: Service,
    settings: AppSettings,
    listener: socket.socket,
    load: Callable[[], EngineClient],
    stopping: Stopping,
    tls: Tls | None,
) -> int:
    limits = ConnectionLimits.of_system()
    server = http_server(create_app(service, settings, limits), limits, tls)
    stop = _Stop()
    _log.info("listening on %s", address_of(listener, tls is not None))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        engine = await _loaded(load, stop)
        stop.listen()  # Libraries of the engine, such as Ray, may have handlers of their own.
    except BaseException:
        server.should_exit = True
        await serving
        raise
    try:
        await service.begin(engine, stopping.snapshot_dir)
        _log.info("ready")
        requested = asyncio.create_task(stop.requested.wait())
        ended = asyncio.wrap_future(engine.ended)
        await asyncio.wait({requested, ended, serving}, return_when=asyncio.FIRST_COMPLETED)
        requested.cancel()
        status = await _drain(service, engine, stop, stopping) if stop.requested.is_set() else 1
        if engine.failure is None:
            return status
        _log.error("the engine has failed", exc_info=engine.failure)
        return 1
    finally:
        service.close()
        server.should_exit = True
        try:
            await serving
        finally:
            await asyncio.to_thread(engine.close, CLOSE_S)
            if engine.stuck:  # Python, and JAX at its exit, would wait for the step that hangs.
                faulthandler.dump_traceback(all_threads=True)
                _exit(1)


async def _loaded(load: Callable[[], EngineClient], stop: _Stop) -> EngineClient:
    """The engine. On a signal while it loads the process exits here: no request is lost, and
    compilation threads cannot be cancelled."""
    loop = asyncio.get_running_loop()
    loading: asyncio.Future[EngineClient] = loop.create_future()

    def run() -> None:
        try:
            result, settle = load(), loading.set_result
        except BaseException as error:
            result, settle = error, loading.set_exception
        loop.call_soon_threadsafe(settle, result)

    threading.Thread(target=run, name="jaxserve-load", daemon=True).start()
    requested = asyncio.create_task(stop.requested.wait())
    await asyncio.wait({loading, requested}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        os._exit(128 + stop.first)
    requested.cancel()
    return loading.result()


async def _drain(service: Service, engine: EngineClient, stop: _Stop, stopping: Stopping) -> int:
    """Drain requests, and return the exit status."""
    _log.info(
        "draining %d sequences for up to %g s", service.num_sequences, stopping.shutdown_timeout
    )
    draining = asyncio.create_task(service.drain(stopping.shutdown_timeout))
    repeated = asyncio.create_task(stop.repeated.wait())
    await asyncio.wait({draining, repeated}, return_when=asyncio.FIRST_COMPLETED)
    repeated.cancel()
    if draining.done() and draining.result() and not service.holds_unclaimed:
        if stopping.snapshot_dir is not None and engine.failure is None:
            discard(stopping.snapshot_dir)
        return 0
    draining.cancel()
    status, directory = 0, stopping.snapshot_dir
    if directory is not None and engine.failure is None:
        try:
            await engine.snapshot(directory, deadline_s=SNAPSHOT_S)
            status = STOPPED
            _log.info("snapshot written to %s, for the next server to resume", directory)
        except EngineClosedError:
            pass  # It fails now, and says why.
        except SnapshotError as error:
            status = 1
            _log.error("requests are aborted, without a snapshot: %s", error)
    await service.abort_all()
    await service.drain(FLUSH_TIMEOUT_S)
    return status


def _exit(status: int) -> NoReturn:
    logging.shutdown()
    os._exit(status)


class _Stop:
    """Events of the first SIGTERM or SIGINT (`requested`) and of the second (`repeated`). The third
    one ends the process."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.repeated = asyncio.Event()
        self.first = 0
        self.listen()

    def listen(self) -> None:
        """Install the signals' handlers, also in the place of others."""
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self.repeated.is_set():
            os._exit(128 + number)
        self.first = self.first or number
        (self.repeated if self.requested.is_set() else self.requested).set()


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers, which would not drain requests."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
