"""Writes any model as an Orbax checkpoint, which loads by shard."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxserve.core.dtypes import default_dtype, full_dtype
from jaxserve.core.errors import ModelError
from jaxserve.models.family import Params
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.directory import CONFIG
from jaxserve.models.loading.orbax import save_params
from jaxserve.models.loading.params import Progress, load_params
from jaxserve.models.quantization_config import FIELD
from jaxserve.models.registry import param_specs
from jaxserve.text.tokenizer import Tokenizer


def convert(
    source: str | Path | None,
    destination: str | Path,
    *,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write `source` (anything `open_checkpoint` opens) to the new directory `destination`.

    The directory is a complete model with parameters, config, generation defaults and tokenizer,
    and is created atomically. Without `dtype` the weights are stored as the current platform would
    load them. The host needs memory for the whole model. Raises ModelError when `destination`
    exists and is not an empty directory or cannot be written, and whatever opening `source` raises.
    """
    destination = Path(destination).expanduser().absolute()
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise ModelError(f"{destination} already exists; give a new directory, or delete it first.")
    checkpoint = open_checkpoint(source)
    tokenizer = checkpoint.tokenizer()
    # On the host, so that a model larger than one accelerator can be converted.
    host = SingleDeviceSharding(jax.devices("cpu")[0])
    specs = param_specs(checkpoint.config)
    params = load_params(
        checkpoint,
        specs,
        dtype=full_dtype(dtype) or default_dtype(jax.default_backend()),
        shardings=jax.tree.map(lambda spec: host, specs),
        progress=progress,
    )
    try:
        _write(params, _plain(checkpoint.config_files()), tokenizer, destination)
    except OSError as error:
        raise ModelError(f"{destination} cannot be written: {error}.") from error
    return destination


def _plain(configs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The files of a model whose weights are not quantized any more."""
    config = {name: value for name, value in configs[CONFIG].items() if name != FIELD}
    return configs | {CONFIG: config}


def _write(
    params: Params, configs: dict[str, dict[str, Any]], tokenizer: Tokenizer, destination: Path
) -> None:
    """Write everything to a temporary directory, then rename it."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=destination.parent, prefix=f".{destination.name}-"
    ) as scratch:
        staging = Path(scratch) / "model"
        staging.mkdir()
        save_params(params, staging)
        for name, content in configs.items():
            (staging / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        tokenizer.save(staging)
        staging.rename(destination)
