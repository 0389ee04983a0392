"""Measured step times of one engine on one machine, as `jaxserve profile` writes them.

A dispatch takes `base_s` of its program, plus `context_s` per token that decodes attend to, plus
`pair_s` per (prefilled query, visible key) pair: the model of Medha's and Vidur's predictors, with
one table entry for each compiled program, since padding makes step times a staircase.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from jaxserve.core.devices import DeviceSpec, device_of_kind
from jaxserve.core.errors import ConfigError
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.core.steps.plan import StepPlan
from jaxserve.metrics.statistics import percentile
from jaxserve.scheduler.step_time import StepLoad
from jaxserve.simulator.step_times import PrefixSharing

_FORMAT = 1


class StepSample(NamedTuple):
    """A measured dispatch. `held_out`: for judging a fit, which is made without it."""

    key: ProgramKey
    context_tokens: int
    num_pairs: int
    seconds: float
    held_out: bool = False


class ProgramTime(NamedTuple):
    """The cost of one program."""

    base_s: float
    context_s: float = 0.0
    pair_s: float = 0.0

    def of(self, context_tokens: float, num_pairs: int) -> float:
        return self.base_s + self.context_s * context_tokens + self.pair_s * num_pairs


class HeldOut(NamedTuple):
    """Relative errors of a fit on samples that it has not seen."""

    samples: int
    median: float
    most: float


class ProfileMismatch(ConfigError):
    """A profile is of another engine."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """What was measured, and of which engine.

    Attributes:
        settings: those of the engine that determine its programs.
        model: sizes of its model.
        device: `platform`, `kind` and `memory_bytes` of the device.
        host_bytes_per_s: between host memory and the device; None if it was not measured.
        page_copy_s: time of copying one KV page on the device.
        programs: the cost of each.
        held_out: how well the measurements are predicted.
    """

    settings: Mapping[str, Any]
    model: Mapping[str, Any]
    device: Mapping[str, Any]
    host_bytes_per_s: float | None
    page_copy_s: float
    programs: Mapping[ProgramKey, ProgramTime]
    held_out: HeldOut

    def step(self, key: ProgramKey, plans: Sequence[StepPlan]) -> float:
        return self.step_reading(key, plans, 0.0)

    def step_reading(self, key: ProgramKey, plans: Sequence[StepPlan], saved: float) -> float:
        """As `step`, of decodes that read `saved` tokens of their contexts less."""
        load = StepLoad.together(map(StepLoad.of, plans))
        return self._program(key).of(load.context_tokens - saved, load.num_pairs)

    def copy(self, num_pages: int) -> float:
        return num_pages * self.page_copy_s

    def _program(self, key: ProgramKey) -> ProgramTime:
        """The cost of a program; of the next larger one if it was not measured, because only the
        steps of several pipeline stages fill it."""
        if key in self.programs:
            return self.programs[key]
        larger = [
            known
            for known in self.programs
            if known.rows >= key.rows
            and known.prefill_tokens >= key.prefill_tokens
            and known.width >= key.width
        ]
        known = min(larger or self.programs, key=lambda other: other.num_tokens)
        return self.programs[known]

    def is_of(self, device: DeviceSpec) -> bool:
        """Whether it was measured on such a device."""
        kind = self.device["kind"]
        known = device_of_kind(kind)  # "TPU v5 lite" is no "TPU v5", which it begins with.
        another = known is not None and len(known.kind) > len(device.kind)
        return self.device["platform"] == device.platform and device.is_called(kind) and not another

    def is_of_same_engine(self, other: Profile) -> bool:
        """Whether both have times of the same programs."""
        own, others = (
            (one.device["platform"], one.device["kind"], one.model, one.settings)
            for one in (self, other)
        )
        return own == others

    def check(self, config: EngineConfig, model: Mapping[str, Any]) -> None:
        """Raises ProfileMismatch when an engine of a resolved `config` has other programs."""
        if self.model != dict(model):
            raise ProfileMismatch(
                f"the profile is of a model with {_shown(self.model)}, and this one has "
                f"{_shown(model)}; profile this model."
            )
        for name, value in _plain(config.of_programs()).items():
            measured = self.settings.get(name)
            if measured != value:
                raise ProfileMismatch(
                    f"{name} is {value}, but the profile was measured with {measured}; set it to "
                    "that, or profile again."
                )

    def write(self, path: Path) -> None:
        """Raises OSError."""
        document = dataclasses.asdict(self) | {
            "format": _FORMAT,
            "settings": _plain(self.settings),
            "programs": [key._asdict() | time._asdict() for key, time in self.programs.items()],
            "held_out": self.held_out._asdict(),
        }
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ConfigError for a file that is no profile."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document.pop("format") != _FORMAT:
                raise ValueError("it is of another version of jaxserve; profile again")
            programs = dict(map(_program, document.pop("programs")))
            held_out = HeldOut(**document.pop("held_out"))
            _check(document)
            if not programs:
                raise ValueError("it has no programs; profile again")
            return cls(**document, programs=programs, held_out=held_out)
        except KeyError as error:
            raise ConfigError(f"profile {str(path)!r} has no {error}; profile again.") from error
        except (OSError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(f"profile {str(path)!r} cannot be read: {error}.") from error


@dataclasses.dataclass(frozen=True)
class ProfiledTimes:
    """The step times of a profile, where decodes that share a prefix read it together."""

    profile: Profile
    shared: PrefixSharing

    def step(self, key: ProgramKey, plans: Sequence[StepPlan]) -> float:
        saved = min(self.shared.saved(plan) for plan in plans)
        return self.profile.step_reading(key, plans, saved)

    def copy(self, num_pages: int) -> float:
        return self.profile.copy(num_pages)


def _program(row: Mapping[str, Any]) -> tuple[ProgramKey, ProgramTime]:
    """A program and its cost. Raises KeyError, TypeError or ValueError."""
    key = ProgramKey(*(row[name] for name in ProgramKey._fields))
    sizes = (key.rows, key.prefill_tokens, key.width)
    if not all(type(size) is int and size >= 0 for size in sizes) or type(key.ring) is not bool:
        raise ValueError(f"{row!r:.200} is no program")
    time = ProgramTime(*(_number(name, row[name]) for name in ProgramTime._fields))
    return key, time


def _check(document: Mapping[str, Any]) -> None:
    """Raises KeyError or ValueError for a field of a wrong type or out of range."""
    for name in ("settings", "model", "device"):
        if not isinstance(document[name], dict):
            raise ValueError(f"{name} is {document[name]!r:.200}; it must be an object")
    device = document["device"]
    if device["platform"] not in ("gpu", "tpu", "cpu") or not isinstance(device["kind"], str):
        raise ValueError(f"device is {device!r:.200}, which is no device of JAX")
    if type(device["memory_bytes"]) is not int or device["memory_bytes"] < 1:
        raise ValueError(f"memory_bytes is {device['memory_bytes']!r:.200}; it must be above 0")
    if document["host_bytes_per_s"] is not None:
        _number("host_bytes_per_s", document["host_bytes_per_s"], above=True)
    _number("page_copy_s", document["page_copy_s"])


def _number(name: str, value: Any, above: bool = False) -> float:
    """Raises ValueError unless `value` is a finite number of 0 or more, or `above` 0."""
    if type(value) not in (int, float) or not 0 <= value < math.inf or (above and not value):
        least = "above 0" if above else "of 0 or more"
        raise ValueError(f"{name} is {value!r:.200}; it must be a number {least}")
    return float(value)


def fitted(samples: Iterable[StepSample]) -> tuple[dict[ProgramKey, ProgramTime], HeldOut]:
    """The cost of each program by least squares over relative errors, no coefficient below 0; and
    the errors on held-out samples of a fit without them."""
    by_key: dict[ProgramKey, list[StepSample]] = defaultdict(list)
    for sample in samples:
        by_key[sample.key].append(sample)
    errors = []
    for found in by_key.values():
        time = _fit([sample for sample in found if not sample.held_out])
        errors += [
            abs(time.of(sample.context_tokens, sample.num_pairs) / sample.seconds - 1)
            for sample in found
            if sample.held_out
        ]
    held_out = HeldOut(len(errors), percentile(errors, 50), max(errors)) if errors else None
    return {key: _fit(found) for key, found in by_key.items()}, held_out or HeldOut(0, 0.0, 0.0)


def _fit(samples: Sequence[StepSample]) -> ProgramTime:
    seconds = np.array([sample.seconds for sample in samples])
    loads = np.array([(1, sample.context_tokens, sample.num_pairs) for sample in samples], float)
    best, least = ProgramTime(float(np.median(seconds))), np.inf
    # With a negative coefficient the best is that of fewer terms, of which there are few.
    for columns in ([0, 1, 2], [0, 1], [0, 2], [0]):
        terms = loads[:, columns]
        scale = np.maximum(np.abs(terms).max(axis=0), 1)
        found = np.linalg.lstsq(terms / scale / seconds[:, None], np.ones(len(seconds)))[0] / scale
        error = np.square(terms @ found / seconds - 1).sum()
        if (found >= 0).all() and error < least * (1 - 1e-9):
            coefficients = dict(zip(columns, found.tolist()))
            best, least = ProgramTime(*(coefficients.get(place, 0.0) for place in range(3))), error
    return best


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives them back."""
    return json.loads(json.dumps(settings, default=str))


def _shown(sizes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sizes.items())
