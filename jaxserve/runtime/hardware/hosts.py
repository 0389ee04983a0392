"""Coordination of a job's hosts: step log, heartbeats, comparison of settings."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jaxserve.core.errors import DistributedError
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.version import __version__
from jaxserve.runtime.hardware.jax_private import coordination_client

VERSIONS = {
    "the version of jaxserve": __version__,
    "the version of JAX": jax.__version__,
}
"""What all hosts of an engine must have alike, by its name in an error."""

_BEAT_S = 1.0
_SILENCE_S = 12.0
"""A host without a heartbeat for this long is lost."""
_SHUTDOWN_TIMEOUT_S = 5.0
"""Time for the engine to shut down when a host is lost, before the process exits."""
_STEP_TIMEOUT_S = 300.0
"""Timeout for another host at a step."""
_START_TIMEOUT_S = 3600.0
"""Timeout before the first step: another host may be fetching a model or compiling programs."""
_KEPT_ENTRIES = 64
_LEFT = "left"
"""Prefix of a host's last heartbeat; the rest is the reason."""

_numbers = itertools.count()

StoreError = jax.errors.JaxRuntimeError
"""Raised by every method when the service does not answer."""


class KeyValueStore:
    """The store of JAX's coordination service, which host 0 runs: values by key, for the hosts of
    this job. Any thread may use it."""

    def __init__(self) -> None:
        self._client = coordination_client()

    def set(self, key: str, value: bytes, *, overwrite: bool = False) -> None:
        """Raises StoreError also for a key that has a value, unless `overwrite`."""
        self._client.key_value_set_bytes(key, value, allow_overwrite=overwrite)

    def get(self, key: str, timeout_s: float) -> bytes:
        """Waits for a value. Raises TimeoutError when it is not set in time."""
        try:
            return self._client.blocking_key_value_get_bytes(key, round(timeout_s * 1000))
        except StoreError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                raise TimeoutError(key) from error
            raise

    def list(self, prefix: str) -> dict[str, bytes]:
        """The values of all keys that begin with `prefix`, which ends with a slash."""
        return dict(self._client.key_value_dir_get_bytes(prefix))

    def delete(self, key: str) -> None:
        self._client.key_value_delete(key)


class Hosts:
    """This host's view of all hosts of one engine. Engines are made in the same order on each."""

    def __init__(self) -> None:
        self.host, self.num_hosts = jax.process_index(), jax.process_count()
        self._store = KeyValueStore()
        self._prefix = f"jaxserve/{next(_numbers)}"
        self._lost: str | None = None
        self._closed = threading.Event()
        self._lock = threading.Lock()  # no heartbeat follows the last one
        self._since: float | None = None
        self._timeout_s = _START_TIMEOUT_S
        self._watch = threading.Thread(target=self._keep_watch, name="jaxserve-hosts", daemon=True)
        self._watch.start()

    def compare(self, about: str, facts: Mapping[str, Any]) -> None:
        """Raises DistributedError, with both values, when a fact differs on another host.
        `about` identifies this comparison among others."""
        facts = json.loads(json.dumps(dict(facts), default=str))
        self._store.set(f"{self._prefix}/{about}/{self.host}", json.dumps(facts).encode())
        for other in range(self.num_hosts):
            theirs = json.loads(self._get(f"{about}/{other}", f"host {other} to start"))
            for name in sorted(facts.keys() | theirs.keys()):
                if facts.get(name) != theirs.get(name):
                    raise DistributedError(
                        f"{name} is {facts.get(name)} on host {self.host} and {theirs.get(name)} "
                        f"on host {other}; all hosts need the same."
                    )

    def minimum(self, name: str, value: int) -> int:
        """The minimum over all hosts. Raises DistributedError when a host's value is missing."""
        return min(self.gather(name, value))

    def gather(self, name: str, value: Any, what_for: str = "to start") -> list[Any]:
        """The values of all hosts, which JSON can say, in order. Raises DistributedError when a
        host's value is missing."""
        self._store.set(f"{self._prefix}/{name}/{self.host}", json.dumps(value).encode())
        return [
            json.loads(self._get(f"{name}/{other}", f"host {other} {what_for}"))
            for other in range(self.num_hosts)
        ]

    def forget(self, name: str) -> None:
        """Delete this host's value of a `gather` that all hosts have done."""
        self._store.delete(f"{self._prefix}/{name}/{self.host}")

    def all_ready(self) -> None:
        """Wait until all hosts are ready for steps."""
        self.minimum("ready", 0)
        self._timeout_s = _STEP_TIMEOUT_S

    def publish(self, number: int, entry: bytes) -> None:
        self._store.set(f"{self._prefix}/log/{number}", entry)
        if number >= _KEPT_ENTRIES:  # No host lags this far: steps need all hosts.
            self._store.delete(f"{self._prefix}/log/{number - _KEPT_ENTRIES}")

    def receive(self, number: int, wait: bool) -> bytes:
        return self._get(f"log/{number}", f"host 0 at step {number}", wait)

    @contextlib.contextmanager
    def with_timeout(self) -> Iterator[None]:
        """For a block that waits for other hosts: if it takes too long, this process exits."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def blame(self, error: BaseException) -> DistributedError | None:
        """The error that names the lost host, if that loss caused a step's error."""
        deadline = time.monotonic() + _SILENCE_S + 2 * _BEAT_S
        while self._lost is None and time.monotonic() < deadline:
            time.sleep(_BEAT_S / 4)
        return None if self._lost is None else DistributedError(f"{self._lost} ({error!s:.80})")

    def close(self) -> None:
        """Leave, with the reason if a host was lost, so that the others stop waiting for this host.
        Idempotent."""
        with self._lock:
            if not self._closed.is_set():
                self._closed.set()
                self._beat(_LEFT + (self._lost or ""))

    def _get(self, key: str, what: str, wait: bool = False) -> bytes:
        """A value that another host sets. Raises DistributedError when it does not arrive."""
        begin = time.monotonic()
        self._since = None if wait else begin
        try:
            return self._wait_for(key, what, wait, begin)
        finally:
            self._since = None

    def _wait_for(self, key: str, what: str, wait: bool, begin: float) -> bytes:
        while True:
            try:
                return self._store.get(f"{self._prefix}/{key}", _BEAT_S)
            except (TimeoutError, StoreError) as error:
                if self._lost is not None:
                    raise DistributedError(self._lost) from error
                if not isinstance(error, TimeoutError):
                    raise self.blame(error) or error from error
            if not wait and time.monotonic() - begin > self._timeout_s:
                raise DistributedError(
                    f"host {self.host} waited for {what} for {self._timeout_s:g} s. See that "
                    "host's log; every host must run the same script."
                )

    def _beat(self, value: str) -> None:
        try:
            self._store.set(f"{self._prefix}/beats/{self.host}", value.encode(), overwrite=True)
        except StoreError:
            self._lost = self._lost or "host 0 was lost: its coordination service does not answer"

    def _keep_watch(self) -> None:
        heard: dict[int, tuple[str, float]] = {}
        for count in itertools.count():
            self._closed.wait(_BEAT_S)
            with self._lock:
                if self._closed.is_set():
                    return
                self._beat(str(count))
            now = time.monotonic()
            for host, beat in self._beats().items():
                if heard.get(host, ("", 0.0))[0] != beat:
                    heard[host] = beat, now
            waited_s = 0 if self._since is None else now - self._since
            self._lost = self._lost or lost_one(heard, now, waited_s)
            if self._lost is None and waited_s > self._timeout_s:
                self._lost = f"a step takes more than {self._timeout_s:g} s"
            if self._lost is not None:
                self._give_up()
                return

    def _beats(self) -> dict[int, str]:
        """The newest heartbeat of each host that has started."""
        try:
            found = self._store.list(f"{self._prefix}/beats/")
        except StoreError:
            return {}
        return {int(key.rpartition("/")[2]): beat.decode() for key, beat in found.items()}

    def _give_up(self) -> None:
        """Exit this process, which may hang in a step that waits for a lost host."""
        if self._closed.wait(_SHUTDOWN_TIMEOUT_S):
            return
        print(f"jaxserve: host {self.host} ends: {self._lost}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)


def lost_one(heard: Mapping[int, tuple[str, float]], now: float, waited_s: float) -> str | None:
    """Why a host counts as lost, or left while others wait for it; None if none is.

    `heard` has each host's latest heartbeat and its time. Hosts detect a silent host at different
    times and then leave: the reason such a host gives takes precedence over its leaving.
    """
    for beat, _ in heard.values():
        if beat.startswith(_LEFT) and beat != _LEFT:
            return beat.removeprefix(_LEFT)
    for host, (beat, when) in heard.items():
        if beat != _LEFT and now - when > _SILENCE_S:
            return f"host {host} was lost: silent for {_SILENCE_S:g} s"
    for host, (beat, _) in heard.items():
        if beat == _LEFT and waited_s > _SILENCE_S:
            return f"host {host} has closed its engine"
    return None


def common_settings(config: EngineConfig) -> dict[str, Any]:
    """Settings that must be equal on all hosts. Paths may differ."""
    settings = dataclasses.asdict(config)
    settings["logits_processors"] = [
        each if isinstance(each, str) else getattr(each, "__name__", "")
        for each in config.logits_processors
    ]
    if config.speculative_config is not None:
        del settings["speculative_config"]["model"]
    return {name: settings[name] for name in settings if name not in ("model", "disk_kv_dir")}
