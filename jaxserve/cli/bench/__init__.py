"""`jaxserve bench`: benchmark an engine in this process, or a server under load."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro
from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes

from jaxserve.cli.bench.offline import Offline
from jaxserve.cli.bench.serve import Serve

_Kind = (
    Annotated[Offline, tyro.conf.subcommand("offline")]
    | Annotated[Serve, tyro.conf.subcommand("serve")]
)


@dataclasses.dataclass(frozen=True)
class Bench:
    """Benchmark an engine in this process (`offline`), or any OpenAI endpoint (`serve`)."""

    kind: OmitArgPrefixes[OmitSubcommandPrefixes[_Kind]]

    def run(self) -> int:
        return self.kind.run()
