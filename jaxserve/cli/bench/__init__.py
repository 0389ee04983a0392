"""`jaxserve bench`: benchmark an engine in this process, its accuracy, or a server under load."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro
from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes

from jaxserve.cli.bench.accuracy import Accuracy
from jaxserve.cli.bench.offline import Offline
from jaxserve.cli.bench.serve import BenchServe

BenchCommand = (
    Annotated[Accuracy, tyro.conf.subcommand("accuracy")]
    | Annotated[Offline, tyro.conf.subcommand("offline")]
    | Annotated[BenchServe, tyro.conf.subcommand("serve")]
)


@dataclasses.dataclass(frozen=True)
class Bench:
    """Benchmark an engine in this process (`offline`), what compressed KV does to its answers
    (`accuracy`), or any OpenAI endpoint (`serve`)."""

    kind: OmitArgPrefixes[OmitSubcommandPrefixes[BenchCommand]]

    def run(self) -> int:
        return self.kind.run()
