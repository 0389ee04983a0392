"""`jaxserve cluster`: the replicas of a running server, their restart, and other meshes."""

from __future__ import annotations

import dataclasses
import json
import time
import urllib.error
import urllib.request
from datetime import timedelta
from http import HTTPStatus
from typing import Annotated, Any

import tyro
from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes

from jaxserve.cli.arguments.options import Common, check_base_url
from jaxserve.core.errors import EndpointError
from jaxserve.core.process.tables import table

_POLL_S = 0.5
_TIMEOUT_S = 30.0


@dataclasses.dataclass(frozen=True)
class _Server(Common):
    """A server with several replicas.

    Attributes:
        base_url: URL of the server, such as http://127.0.0.1:8000.
        api_key: sent as a bearer token.
    """

    base_url: str = "http://127.0.0.1:8000"
    api_key: str | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError before anything is sent."""
        check_base_url(self.base_url)

    def _call(
        self, path: str, method: str = "GET", body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The status that a route answers with. Raises EndpointError, with the server's reason."""
        url = self.base_url.rstrip("/").removesuffix("/v1") + path
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.NOT_FOUND:
                raise EndpointError(
                    f"the server at {self.base_url} has one engine and no replicas; start it with "
                    "`jaxserve serve --data-parallel-size`."
                ) from None
            raise EndpointError(f"{url}: {_reason(error)}") from None
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", error)
            raise EndpointError(
                f"{self.base_url} cannot be reached ({why}); is the server running?"
            ) from None

    def _end_of(self, change: str, status: dict[str, Any]) -> dict[str, Any]:
        """Waits for the end of a restart or a resize, printing each step; returns its status."""
        told = ""
        while status[change]["running"]:
            states = ", ".join(f"{each['index']} {each['state']}" for each in status["replicas"])
            if states != told:
                print(f"replicas: {states}", flush=True)
                told = states
            time.sleep(_POLL_S)
            status = self._call("/cluster/status")
        return status[change]


@dataclasses.dataclass(frozen=True)
class Status(_Server):
    """Print each replica of a server: its state, load, model and version, and since when.

    Attributes:
        json: print the server's answer instead.
    """

    json: bool = False

    def run(self) -> int:
        status = self._call("/cluster/status")
        print(json.dumps(status, indent=1) if self.json else described(status, time.time()))
        return 0


@dataclasses.dataclass(frozen=True)
class Restart(_Server):
    """Restart the replicas of a server one after another, and wait until all serve again.

    A replica gets no more requests, and those it has go on in the others, or end. Then its process
    is replaced, and loads the model again. No request is lost.
    """

    def run(self) -> int:
        begin = time.monotonic()
        restart = self._end_of("restart", self._call("/cluster/restart", "POST"))
        took_s = time.monotonic() - begin
        done = f"{restart['num_restarted']} of {restart['num_replicas']} replicas were restarted"
        if restart["error"] is not None:
            raise EndpointError(f"{done}, then: {restart['error']}")
        print(f"{done} in {took_s:.1f} s")
        return 0


@dataclasses.dataclass(frozen=True)
class ResizeReplica(_Server):
    """Give a replica another mesh, and wait until it serves again.

    Its requests go on with the tokens and the KV that they have: in other replicas that have room,
    else in its new process, for which they wait. If it cannot be loaded with that mesh, it is
    loaded with the one that it had.

    Attributes:
        replica: index of the replica.
        tensor_parallel_size: devices that each layer's heads and MLP are split over; by default, as
            for the other sizes, it stays.
        pipeline_parallel_size: stages of consecutive layers.
        context_parallel_size: devices that the KV of each sequence is split over.
    """

    replica: int = 0
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    context_parallel_size: int | None = None

    def run(self) -> int:
        names = "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"
        sizes = {name: size for name in names if (size := getattr(self, name)) is not None}
        body = {"replica": self.replica} | sizes
        resize = self._end_of("resize", self._call("/cluster/resize", "POST", body))
        if resize["error"] is not None:
            raise EndpointError(f"replica {self.replica} was not resized: {resize['error']}")
        print(
            f"replica {self.replica} has {resize['sizes']} after {resize['took_s']:.1f} s; "
            f"{resize['num_kept']} requests waited for it with their KV"
        )
        if resize["num_cut"]:
            print(
                f"requests whose KV, or some of it, was computed again: {resize['num_cut']}; half "
                "of Ray's object store has no room for it (`ray start --object-store-memory`)"
            )
        return 0


_Kind = (
    Annotated[Status, tyro.conf.subcommand("status")]
    | Annotated[Restart, tyro.conf.subcommand("restart")]
    | Annotated[ResizeReplica, tyro.conf.subcommand("resize")]
)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Show the replicas of a server (`status`), restart them one after another (`restart`), or give
    one of them another mesh (`resize`)."""

    kind: OmitArgPrefixes[OmitSubcommandPrefixes[_Kind]]

    def run(self) -> int:
        return self.kind.run()


def described(status: dict[str, Any], now_s: float) -> str:
    """The status of a cluster as a table, and lines about a restart, a resize and autoscaling."""
    rows = [
        (
            "replica",
            "role",
            "state",
            "for",
            "requests",
            "sequences",
            "KV pages",
            "lost",
            "version",
            "model",
            "mesh",
        )
    ]
    for each in status["replicas"]:
        rows.append(
            (
                f"{each['index']} ({each['process'] or 'no process yet'})",
                each["role"],
                each["state"],
                str(timedelta(seconds=round(now_s - each["since_s"]))),
                str(each["num_requests"]),
                f"{each['num_sequences']} of {each['max_num_seqs']}",
                f"{each['num_used_pages']} of {each['num_pages']}",
                str(each["num_losses"]),
                each["version"],
                f"{each['model']} {each['fingerprint'][:8]}",
                each["sizes"],
            )
        )
    lines = [table(rows)]
    if (restart := status["restart"]) is not None:
        state = "is going on" if restart["running"] else "has ended"
        done = f"{restart['num_restarted']} of {restart['num_replicas']} replicas"
        why = f": {restart['error']}" if restart["error"] is not None else ""
        lines.append(f"the latest rolling restart {state}, with {done} restarted{why}")
    if (resize := status.get("resize")) is not None:
        state = "is going on" if resize["running"] else f"took {resize['took_s']:.1f} s"
        why = f": {resize['error']}" if resize["error"] is not None else ""
        what = f"of replica {resize['replica']} to {resize['sizes']}"
        lines.append(f"the latest resize {what} {state}{why}")
    if (scaling := status.get("scaling")) is not None:
        bounds = f"{scaling['min_replicas']} to {scaling['max_replicas']} replicas"
        done = f"{scaling['num_added']} added, {scaling['num_removed']} removed"
        lines.append(f"autoscaling of {bounds}: {done}")
    return "\n".join(lines)


def _reason(error: urllib.error.HTTPError) -> str:
    """What the body of an error says."""
    try:
        return json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError, OSError):
        return f"HTTP status {error.code}"
