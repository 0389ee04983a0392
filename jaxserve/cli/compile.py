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

    Programs belong to the settings they were compiled with. Unless --max-num-seqs is given, both
    sets are made: the one for many requests, and the small one of `generate` and `chat`.
    """

    engine: ModelSettings = dataclasses.field(default_factory=ModelSettings)

    def run(self) -> int:
        from jaxserve.runtime import startup

        if not self.engine.compilation_cache:
            raise ConfigError(
                "compilation_cache is False, so there is nowhere to compile to; leave it on."
            )
        configs = [self.engine]
        if self.engine.max_num_seqs is None:
            configs.append(dataclasses.replace(self.engine, max_num_seqs=1))
        for config in configs:
            begin = time.monotonic()
            decided = startup.plan(config)
            with TerminalProgress() as progress:
                programs = decided.compile(progress).result()
            decided.with_programs(programs)
            found = sum(program.from_cache for program in programs.values())
            print(
                f"max_num_seqs {decided.config.max_num_seqs}: {len(programs) - found} programs "
                f"compiled, {found} already there, in {time.monotonic() - begin:.1f} s\n"
                f"{decided.cache.directory}"
            )
        return 0
