"""What others need to know of an engine: plain data, which can be sent to another process."""

from __future__ import annotations

import dataclasses

from jaxserve.core.model_config import ModelConfig
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.version import __version__


@dataclasses.dataclass(frozen=True)
class EngineInfo:
    """An engine, or several replicas of one behind a client.

    Attributes:
        config: the settings, resolved; of each replica.
        model: the config of the model.
        fingerprint: digest of the weights.
        device_kind: JAX's name for the kind of device.
        logits_processors: names of the logits processors that requests may use.
        num_pages: pages of the KV pool that sequences may hold; of each replica.
        eos_token_ids: tokens that end a sequence.
        weights_version: how often the weights have been replaced.
        data_parallel_size: number of replicas.
        version: that of jaxserve.
    """

    config: EngineConfig
    model: ModelConfig
    fingerprint: str
    device_kind: str
    logits_processors: tuple[str, ...]
    num_pages: int
    eos_token_ids: frozenset[int] = frozenset()
    weights_version: int = 0
    data_parallel_size: int = 1
    version: str = __version__

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of running sequences, of all replicas."""
        return self.data_parallel_size * self.config.max_num_seqs
