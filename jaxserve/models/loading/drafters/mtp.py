"""The layer for further tokens in a model's own checkpoint."""

from __future__ import annotations

from jaxserve.core.errors import ConfigError
from jaxserve.models.drafters import mtp
from jaxserve.models.loading.assemble import check_tensors
from jaxserve.models.loading.checkpoint import Checkpoint
from jaxserve.models.loading.dummy import DummyCheckpoint
from jaxserve.models.loading.safetensors import SafetensorsCheckpoint

_ANY = ("",)


def check(checkpoint: Checkpoint) -> None:
    """Raises ConfigError for a model that has no such layer, or is of a format that never has it,
    WeightsError when its tensors are missing or of other shapes."""
    mtp.layer_of(checkpoint.config)
    if isinstance(checkpoint, DummyCheckpoint):
        return
    if not isinstance(checkpoint, SafetensorsCheckpoint):
        raise ConfigError(
            f"the method is 'mtp', but {checkpoint.path} is a {checkpoint.format} checkpoint, "
            "which has the model's own layers alone; give the model as safetensors."
        )
    specs = mtp.param_specs(checkpoint.config)
    check_tensors(checkpoint, specs, f"{checkpoint.path} for the method 'mtp'", _ANY)
