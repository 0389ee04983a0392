"""What several commands take from the command line, and how it reaches the library."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from jaxserve.cli.progress import TerminalProgress
from jaxserve.config import EngineConfig
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.llm import LLM


@dataclasses.dataclass(frozen=True)
class ModelSettings(EngineConfig):
    """The model, and settings of the engine. None means: decided from the model and the device."""

    model: Annotated[Positional[str | Path], arg(metavar="MODEL")] = EngineConfig.model


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. None means: as the model's authors recommend.

    Attributes:
        max_tokens: the answer ends here at the latest.
        temperature: 0 takes the likeliest token every time; 1 samples as the model was trained.
        top_p: sample only among the likeliest tokens that together have this probability.
        top_k: sample only among so many of the likeliest tokens.
        min_p: sample only tokens at least this likely, relative to the likeliest.
        repetition_penalty: above 1 makes tokens that were already used less likely.
        stop: texts that end the answer.
    """

    max_tokens: int = 256
    temperature: float | None = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises RequestError at once, and not when the model has been loaded."""
        SamplingParams(**self._given())

    def params(self, llm: LLM) -> SamplingParams:
        return llm.default_sampling_params(**self._given())

    def _given(self) -> dict[str, object]:
        fields = dataclasses.asdict(self).items()
        return {name: value for name, value in fields if value is not None}


def one_at_a_time() -> EngineConfig:
    """Defaults of commands with one reader: the fewest programs, so the fastest first start."""
    return EngineConfig(max_num_seqs=1)


def load(config: EngineConfig, trace_file: Path | None = None) -> LLM:
    """The model ready to generate, with progress shown on the way."""
    from jaxserve.llm import LLM

    with TerminalProgress() as progress:
        return LLM(**dataclasses.asdict(config), progress=progress, trace_file=trace_file)
