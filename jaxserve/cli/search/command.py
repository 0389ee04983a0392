"""The command line that starts a deployment."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

from jaxserve.core.config import EngineConfig


def serve_command(config: EngineConfig, replicas: int) -> str:
    """`jaxserve serve` with the settings of `config` that are not the defaults."""
    return shlex.join(["jaxserve", *serve_words(config, replicas)])


def serve_words(config: EngineConfig, replicas: int) -> list[str]:
    """The arguments of `serve_command`, from `serve` on."""
    words = ["serve", str(config.model)]
    for field in dataclasses.fields(EngineConfig):
        value = getattr(config, field.name)
        if field.name != "model" and value != field.default:
            words += _option(field.name, value)
    if replicas > 1:
        words += _option("data_parallel_size", replicas)
    return words


def _option(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    return [flag, *(map(str, value) if isinstance(value, tuple) else [str(value)])]
