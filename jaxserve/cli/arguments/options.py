"""Options shared by several commands, and how they are passed to the library."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from jaxserve.cli.arguments import engine_options  # noqa: F401  groups the settings in --help
from jaxserve.cli.arguments.values import (
    OptionalDtype,
    OptionalSize,
    OptionalSpeculation,
    Size,
    Texts,
)
from jaxserve.core.errors import ConfigError
from jaxserve.core.process.logs import LogLevel
from jaxserve.core.process.terminal_progress import TerminalProgress
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig

if TYPE_CHECKING:
    from jaxserve.llm import LLM


@dataclasses.dataclass(frozen=True)
class EngineOptions(EngineConfig):
    """Settings of one engine. Those without a default are chosen from the model and the device. A
    size is in bytes, or has a unit, such as 2GiB."""

    dtype: OptionalDtype = None
    kv_cache_memory_bytes: OptionalSize = None
    resident_weight_bytes: OptionalSize = None
    host_kv_bytes: OptionalSize = None
    disk_kv_bytes: Size = 0
    logits_processors: Texts = ()
    speculative_config: OptionalSpeculation = None


@dataclasses.dataclass(frozen=True)
class ModelSettings(EngineOptions):
    """Settings of the engine. Those without a default are chosen from the model and the device. A
    size is in bytes, or has a unit, such as 2GiB."""

    model: Annotated[Positional[str | Path], arg(metavar="MODEL")] = EngineConfig.model


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Those without a default have the value that the model recommends.

    Attributes:
        max_tokens: maximum number of tokens to generate.
        temperature: 0 is greedy; 1 samples from the unscaled distribution.
        top_p: sample only from the most likely tokens with this cumulative probability.
        top_k: sample only from this many most likely tokens.
        min_p: sample only tokens with at least this fraction of the highest probability.
        repetition_penalty: above 1 makes repeated tokens less likely.
        stop: strings that stop generation.
    """

    max_tokens: int = 256
    temperature: float | None = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: Texts = ()

    def __post_init__(self) -> None:
        """Raises RequestError before the model is loaded."""
        self.check()

    def check(self, **more: object) -> None:
        """Raises RequestError for parameters that are refused whatever the model, with `more`."""
        SamplingParams(**self._given() | more)

    def params(self, llm: LLM, **more: object) -> SamplingParams:
        return llm.default_sampling_params(**self._given() | more)

    def _given(self) -> dict[str, object]:
        fields = dataclasses.asdict(self).items()
        return {name: value for name, value in fields if value is not None}


@dataclasses.dataclass(frozen=True)
class Common:
    """Options of every command that runs here.

    Attributes:
        config: a YAML file with more options, such as `log-level: debug`; those of the command line
            take precedence.
        log_level: log messages of this level and above; by default that of JAXSERVE_LOG_LEVEL,
            else info for `serve` and warning for other commands.
    """

    config: Path | None = dataclasses.field(default=None, kw_only=True)
    log_level: LogLevel | None = dataclasses.field(default=None, kw_only=True)


def one_at_a_time() -> EngineOptions:
    """Defaults of single-request commands: the fewest programs, so the fastest first start."""
    return EngineOptions(max_num_seqs=1)


def load(config: EngineConfig, trace_file: Path | None = None) -> LLM:
    """Load an LLM, showing progress."""
    from jaxserve.llm import LLM

    with TerminalProgress() as progress:
        return LLM(**dataclasses.asdict(config), progress=progress, trace_file=trace_file)


def check_base_url(url: str) -> None:
    """Raises ConfigError for the URL of a server that is none of HTTP."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"base_url is {url!r}; start it with http:// or https://.")
