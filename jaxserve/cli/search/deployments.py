"""The deployments of a space, planned, with what each costs and the load that its engines get."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.cli.arguments.load_options import LoadOptions
from jaxserve.cli.planning.described import Described, draft_acceptance
from jaxserve.cli.planning.simulated_load import arrivals, check_lengths
from jaxserve.cli.search.command import serve_words
from jaxserve.cli.search.space import Choice, FixedSettings
from jaxserve.core.devices import DeviceSpec
from jaxserve.core.errors import ConfigError, MemoryPlanError, RequestError
from jaxserve.core.settings.config import EngineConfig
from jaxserve.distributed.launch.serving import ServedDeployment
from jaxserve.loadgen.trace import TraceRequest
from jaxserve.simulator.deployments import capacity
from jaxserve.simulator.deployments.deployment import Deployment
from jaxserve.simulator.deployments.phases import SplitEngines
from jaxserve.simulator.deployments.search import Candidate, EngineUnderLoad
from jaxserve.simulator.deployments.slo import Slo
from jaxserve.simulator.profile import Profile, ProfileMismatch


@dataclasses.dataclass(frozen=True)
class SearchLoad(LoadOptions):
    """The load: its lengths, prefixes and pattern of arrivals. Capacities are searched for at other
    rates; its own is that which the best deployment must serve.

    Attributes:
        num_requests: requests that one engine gets in each simulation: many times those that it
            runs at once, or the queue that a rate leads to is not seen.
    """

    num_requests: int | None = 500


@dataclasses.dataclass(frozen=True)
class SharedLoad:
    """A load that several engines get in turn. Where it has too few requests it is repeated.

    Attributes:
        requests: of the whole load, in order of arrival.
        rate: requests per second of the whole load.
        count: requests that one engine gets.
    """

    requests: Sequence[TraceRequest]
    rate: float
    count: int

    @classmethod
    def of(cls, load: SearchLoad, most_engines: int, seed: int) -> SharedLoad:
        """Raises ConfigError for a trace that is unreadable, or a load that has no rate."""
        count = load.num_requests or SearchLoad.num_requests
        requests = dataclasses.replace(load, num_requests=count * most_engines).requests(seed)
        return cls(requests, load.rate_of(requests), count)

    def share(self, engines: int) -> list[TraceRequest]:
        """The requests of the first of so many engines."""
        length = len(self.requests)
        found = []
        for place in range(0, self.count * engines, engines):
            request, rounds = self.requests[place % length], place // length
            arrival_us = request.arrival_us + round(rounds * length / self.rate * 1e6)
            found.append(dataclasses.replace(request, arrival_us=arrival_us))
        return found


@dataclasses.dataclass(frozen=True)
class Planned:
    """A deployment that fits its devices. `asked` are the settings of its engines as they were
    given, before the rest was chosen for them."""

    choice: Choice
    asked: EngineConfig
    described: Described
    engine: EngineUnderLoad | SplitEngines
    candidate: Candidate

    @property
    def deployment(self) -> Deployment:
        """One engine that does both prefill and decode, with the acceptance of its drafts."""
        engine = self.engine.whole if isinstance(self.engine, SplitEngines) else self.engine
        return engine.deployment

    @property
    def measured(self) -> bool:
        """Whether its step times are those of a profile."""
        return self.described.profile is not None

    def as_json(self) -> dict[str, Any]:
        sources = {"cost": self.candidate.cost, "step_times": self.described.source}
        return dataclasses.asdict(self.choice) | sources

    def manifest(self, image: str) -> str:
        """For Kubernetes. Raises ConfigError as `ServedDeployment.manifest` does."""
        memory, config = self.described.plan.memory, self.asked
        # The files of a model that is quantized when it is loaded are up to four times as large.
        larger = 1 if config.quantization is None else 4
        weights_bytes = memory.weights_bytes * memory.num_devices + memory.host_weights_bytes
        return ServedDeployment(
            tuple(serve_words(config, replicas=1)),
            self.choice.replicas,
            config.num_devices,
            self.described.spec,
            larger * weights_bytes + memory.disk_weights_bytes,
            memory.disk_bytes,
            image,
            self.choice.prefill_replicas,
        ).manifest()


@dataclasses.dataclass(frozen=True)
class Dropped:
    """A deployment that is not possible, and why."""

    choice: Choice
    reason: str
    too_large: bool


@dataclasses.dataclass(frozen=True)
class Planner:
    """Plans deployments. `prices` are those of devices for an hour; without them the cost is the
    number of devices. With `image`, only those that have a manifest with it can be. `acceptance`
    of drafts, where there are any. A deployment has the step times of the first of `profiles` that
    is of its device and its programs; those of no profile are modelled."""

    fixed: FixedSettings
    load: SharedLoad
    slo: Slo
    prices: Mapping[str, float] | None
    image: str | None = None
    acceptance: tuple[float, ...] = ()
    profiles: Sequence[Profile] = ()
    mismatches: dict[int, str] = dataclasses.field(default_factory=dict, init=False)
    """Why a profile, by its number, was of none of the deployments so far; of those that were of
    one, an empty text."""
    _loads: dict[int, capacity.Load] = dataclasses.field(default_factory=dict, init=False)

    def plan(self, choice: Choice) -> Planned | Dropped:
        """Raises ModelError."""
        try:
            asked = self.fixed.of(choice)
            described = self._described(asked, choice.device)
            check_lengths(self.load.requests, described.plan.config.max_model_len)
            engine = self._engine(choice, described)
            price = 1.0 if self.prices is None else self.prices[choice.device]
            candidate = Candidate(price * choice.num_devices, engine.bounds(self.slo))
            planned = Planned(choice, asked, described, engine, candidate)
            if self.image is not None:
                planned.manifest(self.image)
        except (ConfigError, MemoryPlanError, RequestError) as error:
            return Dropped(choice, str(error), isinstance(error, MemoryPlanError))
        return planned

    def _described(self, asked: EngineConfig, device: str) -> Described:
        """Raises as `Described.of`."""
        spec = DeviceSpec.of(device)
        for number, profile in enumerate(self.profiles):
            if not profile.is_of(spec):
                self.mismatches.setdefault(
                    number, f"it was measured on {profile.device['kind']}, which is no {spec.name}."
                )
                continue
            try:
                described = Described.of(asked, device, profile, propose=False)
            except (ProfileMismatch, MemoryPlanError) as error:  # It ran with its own settings.
                self.mismatches.setdefault(number, str(error))
                continue
            self.mismatches[number] = ""
            return described
        return Described.of(asked, device, None, propose=False)

    def _engine(self, choice: Choice, described: Described) -> EngineUnderLoad | SplitEngines:
        """Raises ConfigError."""
        drafts = described.plan.config.speculative_config is not None
        acceptance = draft_acceptance(described.plan.config, self.acceptance if drafts else ())
        deployment = dataclasses.replace(described.deployment, acceptance=acceptance)
        times = described.times

        def one_of(engines: int) -> EngineUnderLoad:
            return EngineUnderLoad(deployment, times, self._load_of(engines))

        if choice.prefill_replicas:
            prefill, decode = choice.prefill_replicas, choice.decode_replicas
            return SplitEngines.of(one_of(prefill), one_of(decode), self.slo)
        return one_of(choice.replicas)

    def _load_of(self, engines: int) -> capacity.Load:
        """The load of the first of so many engines."""
        if engines not in self._loads:
            requests = list(arrivals(self.load.share(engines)))
            self._loads[engines] = capacity.Load(requests, self.load.rate / engines)
        return self._loads[engines]
