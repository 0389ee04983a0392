"""The space of deployments that `jaxserve search` considers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from jaxserve.cli.arguments.options import ModelSettings
from jaxserve.cli.arguments.values import Names
from jaxserve.core.errors import ConfigError
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.settings.speculative import SpeculativeConfig

_STAGES = (1, 2, 4)
_CHUNKS = (512, 2048, 8192)
_OWN = ("num_speculative_tokens", "prefill_replicas")
"""Values that are no settings of one engine."""


@dataclasses.dataclass(frozen=True)
class Space:
    """Values to try, each with all of the others, comma-separated. A mesh of fewer devices than
    there are is used several times, by replicas.

    Attributes:
        tensor_parallel_size: devices that each layer is split over; by default all divisors of the
            number of devices.
        pipeline_parallel_size: stages of consecutive layers; by default 1, 2 and 4.
        context_parallel_size: devices that the KV of each sequence is split over.
        scheduler: how steps are filled.
        max_num_batched_tokens: token budgets of a step; by default 512, 2048 and 8192 more than the
            sequences.
        max_num_seqs: most running sequences of an engine.
        quantization: formats of the weights; none is `dtype`.
        kv_cache_dtype: formats of the KV pages.
        num_speculative_tokens: numbers of drafts of the given speculative_config, 0 for none; by
            default its own.
        prefill_replicas: of several engines, how many only prefill, while the others decode: 0 for
            none, auto for every number.
    """

    tensor_parallel_size: tuple[int, ...] | None = None
    pipeline_parallel_size: tuple[int, ...] | None = None
    context_parallel_size: tuple[int, ...] = (1,)
    scheduler: Names = ("sarathi", "vllm")
    max_num_batched_tokens: tuple[int, ...] | None = None
    max_num_seqs: tuple[int, ...] = (32, 128, 512)
    quantization: Names = ("none",)
    kv_cache_dtype: Names = ("auto",)
    num_speculative_tokens: Names = ()
    prefill_replicas: Names = ("0",)

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that no engine takes."""
        for name, values in vars(self).items():
            for value in values or ():
                if name not in _OWN:
                    EngineConfig(**{name: _value(value)})
        for word in self.prefill_replicas:
            if word != "auto" and not word.isdecimal():
                raise ConfigError(
                    f"prefill_replicas has {word!r}; it must be numbers of engines, or auto."
                )

    def choices(
        self,
        devices: Sequence[str],
        counts: Sequence[int],
        *,
        experts: bool,
        speculative: SpeculativeConfig | None = None,
    ) -> Iterator[Choice]:
        """All deployments, of models with `experts` with whole experts on a device as well.

        Raises ConfigError when no mesh divides a number of devices, and for numbers of drafts that
        `speculative` does not take.
        """
        drafts = list(self._drafts(speculative))
        meshes = [(count, *mesh) for count in counts for mesh in self._meshes(count)]
        if not meshes:
            raise ConfigError(
                f"no product of tensor_parallel_size {_listed(self.tensor_parallel_size)}, "
                f"pipeline_parallel_size {_listed(self.pipeline_parallel_size or _STAGES)} and "
                f"context_parallel_size {_listed(self.context_parallel_size)} divides devices "
                f"{_listed(counts)}; add a size that does."
            )
        for device, (count, tensor, stages, seq) in itertools.product(devices, meshes):
            sizes = {
                "tensor_parallel_size": tensor,
                "pipeline_parallel_size": stages,
                "context_parallel_size": seq,
            }
            ways = [{}, {"enable_expert_parallel": True}] if experts and tensor * seq > 1 else [{}]
            replicas = count // (tensor * stages * seq)
            for way, limits, draft, prefill in itertools.product(
                ways, self._limits(), drafts, self._prefilling(replicas)
            ):
                yield Choice(device, count, replicas, sizes | way | limits | draft, prefill)

    def _drafts(self, speculative: SpeculativeConfig | None) -> Iterator[dict[str, Any]]:
        """The settings of each number of drafts. Raises ConfigError."""
        if not self.num_speculative_tokens:
            yield {} if speculative is None else {"speculative_config": speculative}
            return
        if speculative is None:
            raise ConfigError(
                "num_speculative_tokens needs speculative_config, which says how drafts are made; "
                'give it, such as {"method": "ngram", "num_speculative_tokens": 3}.'
            )
        for word in self.num_speculative_tokens:
            if word == "0":
                yield {"speculative_config": None}
                continue
            number = int(word) if word.isdecimal() else word
            changed = dataclasses.replace(speculative, num_speculative_tokens=number)
            yield {"speculative_config": changed}

    def _prefilling(self, replicas: int) -> list[int]:
        """How many of so many engines may only prefill, so that one decodes at least."""
        found: set[int] = set()
        for word in self.prefill_replicas:
            found |= set(range(replicas)) if word == "auto" else {int(word)}
        return sorted(number for number in found if number == 0 or number < replicas)

    def _meshes(self, count: int) -> Iterator[tuple[int, int, int]]:
        """The sizes of meshes whose devices divide `count`."""
        tensors = self.tensor_parallel_size
        if tensors is None:
            tensors = [size for size in range(1, count + 1) if count % size == 0]
        stages = self.pipeline_parallel_size or _STAGES
        for sizes in itertools.product(tensors, stages, self.context_parallel_size):
            tensor, stage, seq = sizes
            if count % (tensor * stage * seq) == 0:
                yield sizes

    def _limits(self) -> Iterator[dict[str, Any]]:
        formats = itertools.product(self.quantization, self.kv_cache_dtype)
        for seqs, (weights, kv), scheduler in itertools.product(
            self.max_num_seqs, formats, self.scheduler
        ):
            for budget in self.max_num_batched_tokens or (seqs + chunk for chunk in _CHUNKS):
                yield {
                    "scheduler": scheduler,
                    "max_num_batched_tokens": budget,
                    "max_num_seqs": seqs,
                    "quantization": _value(weights),
                    "kv_cache_dtype": kv,
                }


@dataclasses.dataclass(frozen=True)
class Choice:
    """A deployment: `replicas` engines of these settings on `num_devices` devices in all, of which
    `prefill_replicas` only prefill; if any do, the others only decode."""

    device: str
    num_devices: int
    replicas: int
    settings: dict[str, Any]
    prefill_replicas: int = 0

    @property
    def decode_replicas(self) -> int:
        """Engines that only decode."""
        return self.replicas - self.prefill_replicas if self.prefill_replicas else 0

    @property
    def mesh(self) -> str:
        """As people abbreviate it."""
        settings = self.settings
        parts = {
            "TP": settings["tensor_parallel_size"],
            "PP": settings["pipeline_parallel_size"],
            "CP": settings["context_parallel_size"],
            "DP": 1 if self.prefill_replicas else self.replicas,
        }
        shown = [f"{name}{size}" for name, size in parts.items() if size > 1]
        if self.prefill_replicas:
            shown.append(f"{self.prefill_replicas} prefill + {self.decode_replicas} decode")
        if settings.get("enable_expert_parallel"):
            shown.insert(1, "EP")
        return " ".join(shown) or "1 device"


@dataclasses.dataclass(frozen=True)
class FixedSettings(ModelSettings):
    """The model and the engine settings that all deployments have. Those without a default are
    chosen from the model and the device. A size is in bytes, or has a unit, such as 2GiB."""

    without_flags: ClassVar[frozenset[str]] = frozenset(
        {"devices", "enable_expert_parallel", *(field.name for field in dataclasses.fields(Space))}
    )

    def of(self, choice: Choice) -> EngineConfig:
        """The engine of a deployment. Raises ConfigError for settings that do not combine."""
        return dataclasses.replace(self, **choice.settings)


def _value(value: Any) -> Any:
    return None if value in ("none", "None") else value


def _listed(values: Sequence[int] | None) -> str:
    return "of any value" if values is None else ",".join(map(str, values))
