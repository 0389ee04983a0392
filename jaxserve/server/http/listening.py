"""Where the server listens: a port, or a Unix socket; with TLS or without."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxserve.core.errors import ConfigError

_MAX_PORT = (1 << 16) - 1
_BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError if the address does not exist or is in use."""
    if not 0 <= port <= _MAX_PORT:
        raise ConfigError(f"port is {port}; it must be in 0..{_MAX_PORT}, 0 for a free one.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Only if the protocol is named, asyncio turns off the delay of small packets (TCP_NODELAY).
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"port is {port}, which cannot be listened on at host {host!r} "
            f"({error.strerror or error}); give others, or port 0 for a free one."
        ) from None
    return listener


@contextlib.contextmanager
def listening_on_file(path: Path) -> Iterator[socket.socket]:
    """A listening Unix socket, replacing one without a listening server. Its file is
    removed in the end. Raises ConfigError if another server has it, or it is something else."""
    listener = _listen_on_file(path)
    try:
        yield listener
    finally:
        listener.close()
        path.unlink(missing_ok=True)


def _listen_on_file(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
            raise OSError("that is not a socket")
        if path.exists() and _answers(path):
            raise OSError("another server listens on it")
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"uds is {str(path)!r}, but {error}; give another path.") from None
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True


def address_of(listener: socket.socket, tls: bool) -> str:
    """The address as a human-readable URL."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


@dataclasses.dataclass(frozen=True)
class Tls:
    """Files in PEM format: the server's certificate chain, its key (None if it is in the same
    file), and authorities of which clients must have a certificate (None requires none)."""

    certfile: Path
    keyfile: Path | None = None
    ca_certs: Path | None = None

    def check(self) -> None:
        """Raises ConfigError, naming the setting, for a file that cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certfile, self.keyfile, password=_no_password)
        except (OSError, ValueError) as error:
            files = " and ".join(repr(str(f)) for f in (self.certfile, self.keyfile) if f)
            raise ConfigError(
                f"ssl_certfile and ssl_keyfile: {files} are not a certificate and its key, in PEM "
                f"and without a password: {error}."
            ) from None
        try:
            if self.ca_certs is not None:
                context.load_verify_locations(self.ca_certs)
        except (OSError, ValueError) as error:
            raise ConfigError(f"ssl_ca_certs {str(self.ca_certs)!r}: {error}.") from None

    @property
    def uvicorn_settings(self) -> dict[str, Any]:
        return {
            "ssl_certfile": str(self.certfile),
            "ssl_keyfile": None if self.keyfile is None else str(self.keyfile),
            "ssl_ca_certs": None if self.ca_certs is None else str(self.ca_certs),
            "ssl_cert_reqs": ssl.CERT_NONE if self.ca_certs is None else ssl.CERT_REQUIRED,
        }


def _no_password() -> str:
    """Instead of asking at the terminal."""
    raise ValueError("the key has a password")
