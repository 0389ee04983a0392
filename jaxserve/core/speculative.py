"""Settings of speculative decoding."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jaxserve.core.errors import ConfigError

METHODS = ("ngram",)
MAX_SPECULATIVE_TOKENS = 15


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """How tokens are drafted, with vLLM's names.

    Attributes:
        method: "ngram" drafts what followed the last tokens where they occurred before, in the
            prompt or in the output (prompt lookup).
        num_speculative_tokens: tokens drafted for each sequence and step.
        prompt_lookup_max: most tokens that must occur before for a match; longer matches win.
        prompt_lookup_min: fewest.
    """

    num_speculative_tokens: int
    method: str = "ngram"
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the field, its value and the range."""
        if self.method not in METHODS:
            raise ConfigError(
                f"method of speculative_config is {self.method!r}; it must be one of "
                f"{', '.join(METHODS)}."
            )
        for name, most in (
            ("num_speculative_tokens", MAX_SPECULATIVE_TOKENS),
            ("prompt_lookup_max", MAX_SPECULATIVE_TOKENS),
            ("prompt_lookup_min", self.prompt_lookup_max),
        ):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ConfigError(
                    f"{name} of speculative_config is {value!r}; it must be an integer in "
                    f"1..{most}."
                )

    @classmethod
    def of(cls, value: SpeculativeConfig | Mapping[str, Any] | str) -> SpeculativeConfig:
        """The config in a dict or in JSON. Raises ConfigError when it is neither, or incomplete."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ConfigError(
                    f"speculative_config is {value!r}, which is not JSON: {error}."
                ) from None
        if not isinstance(value, Mapping):
            raise ConfigError(f"speculative_config is {value!r}; it must be a dict.")
        known = [field.name for field in dataclasses.fields(cls)]
        for name in value:
            if name not in known:
                raise ConfigError(
                    f"speculative_config has {name!r}; its keys are {', '.join(known)}."
                )
        if "num_speculative_tokens" not in value:
            raise ConfigError("speculative_config has no num_speculative_tokens; give a number.")
        return cls(**value)
