"""`jaxserve compile`: programs into the cache, so that the next start finds them there."""

from __future__ import annotations

import dataclasses
import time

from jaxserve.cli.options import ModelSettings
from jaxserve.cli.progress import TerminalProgress
from jaxserve.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Compile:
    """Compile all programs of an engine into the cache, so that later starts are fast.

    Programs belong to the settings they were compiled with: give those of the command to be
    started, such as --max-num-seqs 1 for `generate` and `chat`.
    """

    engine: ModelSettings = dataclasses.field(default_factory=ModelSettings)

    def run(self) -> int:
        from jaxserve.runtime import startup

        decided = startup.plan(self.engine)
        if decided.cache is None:
            raise ConfigError(
                "compilation_cache is False, so there is nowhere to compile to; leave it on."
            )
        begin = time.monotonic()
        with TerminalProgress() as progress:
            programs = decided.compile(progress).result()
        decided.with_programs(programs)
        found = sum(program.from_cache for program in programs.values())
        print(
            f"{len(programs) - found} programs compiled, {found} already there, in "
            f"{time.monotonic() - begin:.1f} s\n{decided.cache.directory}"
        )
        return 0
