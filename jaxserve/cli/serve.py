"""`jaxserve serve`: OpenAI's HTTP interface."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.cli.follow import follow
from jaxserve.cli.options import ModelSettings
from jaxserve.cli.progress import TerminalProgress
from jaxserve.errors import ConfigError
from jaxserve.output_file import check_output_file

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncEngine

_KEY = re.compile("[!-~]+")


@dataclasses.dataclass(frozen=True)
class Serve:
    """Serve a model to OpenAI's clients, on this machine alone unless told otherwise.

    Answers from the start: 503 until the model is loaded. SIGTERM and Ctrl-C let requests under
    way end; a second one does not wait.

    Attributes:
        host: address to listen at; 0.0.0.0 is every one of this machine's.
        port: port to listen at.
        api_key: a request must show one of these keys, but for /health. Each key is a tenant.
            Other users of this machine can see them in the list of processes: prefer a file.
        api_key_file: a file with an API key in each line.
        served_model_name: names that requests may call the model by; by default as it is called
            here.
        max_queued_requests: sequences that may wait beyond those that run; more get 429.
        max_body_bytes: of one request.
        grace_s: how long requests under way may go on when the server is told to stop.
        checkpoint_dir: what has not ended by then is written here, the exit status is 75, and the
            next server takes it up: a client that sends its request again under its X-Request-Id
            gets the answer that was begun. Without it, such requests end with what they have.
        log_requests: log a line for each request, with times and numbers of tokens.
        trace_file: write a timeline of everything at the end, which opens in ui.perfetto.dev.
    """

    engine: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    api_key_file: Path | None = None
    served_model_name: tuple[str, ...] = ()
    max_queued_requests: int = 1024
    max_body_bytes: int = 8 << 20
    grace_s: float = 20.0
    checkpoint_dir: Path | None = None
    log_requests: bool = False
    trace_file: Path | None = None

    def run(self) -> int:
        self._check()
        import jax

        if jax.distributed.is_initialized() and jax.process_index() > 0:
            return follow(self.engine)
        from jaxserve.server.app import AppSettings
        from jaxserve.server.run import Stopping, listen, serve
        from jaxserve.server.service import Service

        logging.basicConfig(format="%(asctime)s %(message)s")
        logging.getLogger("jaxserve").setLevel(logging.INFO)
        settings = AppSettings(self._keys(), self.max_body_bytes, self.log_requests)
        if self.checkpoint_dir is not None:
            self._check_checkpoint_dir()
        names = self.served_model_name or (str(self.engine.model),)
        service = Service(names, self.max_queued_requests)
        with listen(self.host, self.port) as listener:
            stopping = Stopping(self.grace_s, self.checkpoint_dir)
            return asyncio.run(serve(service, settings, listener, self._load, stopping))

    def _load(self) -> AsyncEngine:
        from jaxserve.async_engine import AsyncEngine

        with TerminalProgress() as progress:
            return AsyncEngine.load(
                **dataclasses.asdict(self.engine), progress=progress, trace_file=self.trace_file
            )

    def _check(self) -> None:
        """Raises ConfigError for settings that cannot be, before anything is loaded."""
        for name, least in (("max_queued_requests", 0), ("max_body_bytes", 1), ("grace_s", 0)):
            if not getattr(self, name) >= least:  # as no NaN is
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be {least} or more.")
        if self.api_key and self.api_key_file is not None:
            raise ConfigError("there is an api_key and an api_key_file; give one of them.")
        if self.trace_file is not None:
            check_output_file("trace_file", self.trace_file)

    def _keys(self) -> tuple[str, ...]:
        """Raises ConfigError for a key that no header could show, and a file that has none."""
        keys = self.api_key
        if self.api_key_file is not None:
            where = f"api_key_file {str(self.api_key_file)!r}"
            try:
                lines = self.api_key_file.read_text(encoding="ascii").splitlines()
            except (OSError, ValueError) as error:
                raise ConfigError(f"{where}: {error}.") from None
            keys = tuple(key for line in lines if (key := line.strip()))
            if not keys:
                raise ConfigError(f"{where} has no key; write one in each line.")
        for place, key in enumerate(keys, 1):
            if not _KEY.fullmatch(key):
                raise ConfigError(f"API key {place} must be printable ASCII without spaces.")
        return keys

    def _check_checkpoint_dir(self) -> None:
        import jax

        from jaxserve.engine.checkpoint import check_writable

        if jax.distributed.is_initialized():
            raise ConfigError("checkpoint_dir is for one host; leave it out for a job of several.")
        check_writable(self.checkpoint_dir)
