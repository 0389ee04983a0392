"""The command line that starts a deployment."""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import Any

from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.settings.speculative import SpeculativeConfig


def serve_command(config: EngineConfig, replicas: int, prefill_replicas: int = 0) -> str:
    """`jaxserve serve` with the settings of `config` that are not the defaults."""
    return shlex.join(["jaxserve", *serve_words(config, replicas, prefill_replicas)])


def serve_words(config: EngineConfig, replicas: int, prefill_replicas: int = 0) -> list[str]:
    """The arguments of `serve_command`, from `serve` on."""
    words = ["serve", str(config.model)]
    for field in dataclasses.fields(EngineConfig):
        value = getattr(config, field.name)
        if field.name != "model" and value != field.default:
            words += _option(field.name, value)
    if prefill_replicas:
        words += _option("prefill_replicas", prefill_replicas)
        words += _option("decode_replicas", replicas - prefill_replicas)
    elif replicas > 1:
        words += _option("data_parallel_size", replicas)
    return words


def _option(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, SpeculativeConfig):
        return [flag, _json(value)]
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    return [flag, *(map(str, value) if isinstance(value, tuple) else [str(value)])]


def _json(config: SpeculativeConfig) -> str:
    """The keys that are not the defaults."""
    fields = dataclasses.fields(config)
    values = {field.name: getattr(config, field.name) for field in fields}
    changed = {field.name for field in fields if values[field.name] != field.default}
    return json.dumps({name: value for name, value in values.items() if name in changed})
