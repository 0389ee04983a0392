"""`jaxserve compile`: fill the compilation cache ahead of a start."""

from __future__ import annotations

import dataclasses
import time

from jaxserve.cli.arguments.options import Common, ModelSettings
from jaxserve.core.errors import ConfigError
from jaxserve.core.process.terminal_progress import TerminalProgress


@dataclasses.dataclass(frozen=True)
class Compile(Common):
    """Compile all programs of an engine into the cache, so that later starts are fast.

    Programs are specific to the settings they were compiled with. Without --max-num-seqs, two sets
    are compiled: the default, and the small one of `generate` and `chat`.
    """

    engine: ModelSettings = dataclasses.field(default_factory=ModelSettings)

    def run(self) -> int:
        from jaxserve.runtime.startup import engine_plan
        from jaxserve.runtime.startup.start import compile_programs

        if not self.engine.compilation_cache:
            raise ConfigError(
                "compilation_cache is False, so compiled programs cannot be stored; leave it on."
            )
        configs = [self.engine]
        if self.engine.max_num_seqs is None:
            configs.append(dataclasses.replace(self.engine, max_num_seqs=1))
        for config in configs:
            begin = time.monotonic()
            decided = engine_plan.plan_engine(config)
            with TerminalProgress() as progress:
                programs = compile_programs(decided, progress).result()
            decided.with_programs(programs)
            found = sum(program.from_cache for program in programs.values())
            print(
                f"max_num_seqs {decided.config.max_num_seqs}: {len(programs) - found} programs "
                f"compiled, {found} already cached, in {time.monotonic() - begin:.1f} s\n"
                f"{decided.cache.directory}"
            )
        return 0
