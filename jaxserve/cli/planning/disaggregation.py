"""`jaxserve serve --disaggregation auto`: how many replicas prefill and how many decode, if any."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, Self

from jaxserve.cli.arguments.load_options import LoadOptions
from jaxserve.cli.planning.described import Described
from jaxserve.cli.planning.simulated_load import arrivals, check_lengths
from jaxserve.core.devices import device_of_kind
from jaxserve.core.errors import ConfigError
from jaxserve.core.settings.config import EngineConfig
from jaxserve.simulator.deployments import capacity
from jaxserve.simulator.deployments.phases import goodput_by_role
from jaxserve.simulator.deployments.placement import EngineGoodput, best_placement
from jaxserve.simulator.deployments.slo import Slo

PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 128
"""Lengths of the load without a trace."""

_log = logging.getLogger(__name__)


class Split(NamedTuple):
    """So many replicas of each kind, with the requests per second that all serve within the SLO;
    and those of the same number of replicas that do both, or of the best split where these win.
    Without prefill replicas all do both."""

    num_prefill: int
    num_decode: int
    goodput: float
    goodput_otherwise: float

    @classmethod
    def of(cls, engine: EngineGoodput, num_replicas: int) -> Self:
        best = best_placement([engine], num_replicas * engine.devices)
        if best.disaggregated:
            together = num_replicas * engine.both
            return cls(best.num_prefill, best.num_decode, best.goodput, together)
        splits = [
            min(count * engine.prefill, (num_replicas - count) * engine.decode)
            for count in range(1, num_replicas)
        ]
        return cls(0, 0, best.goodput, max(splits))

    def __str__(self) -> str:
        within = "requests/s within the SLO"
        if self.num_prefill:
            return (
                f"{self.num_prefill} prefill and {self.num_decode} decode replicas: "
                f"{self.goodput:.3g} {within}, {self.goodput_otherwise:.3g} of as many that do both"
            )
        return (
            f"replicas that do both, with chunked prefill: {self.goodput:.3g} {within}, "
            f"{self.goodput_otherwise:.3g} of the best split"
        )


@dataclasses.dataclass(frozen=True)
class Chooser:
    """Chooses by simulations, of one engine in each role, of the requests of `trace`, or of prompts
    and outputs of fixed lengths. Step times are those of `profile`, or modelled for the devices
    here."""

    slo: str
    trace: Path | None
    profile: Path | None

    def choose(self, config: EngineConfig, num_replicas: int) -> Split:
        """Raises ConfigError when the SLO cannot be met, for one that is none, and where nothing is
        known of the devices' step times."""
        slo = Slo.of(self.slo)
        device = None if self.profile is not None else _device()
        load = LoadOptions(trace=self.trace)
        if self.trace is None:
            load = LoadOptions(input_len=PROMPT_TOKENS, output_len=OUTPUT_TOKENS)
        requests = load.requests_to_search(config.seed)
        described = Described.of(config, device, self.profile)
        check_lengths(requests, described.plan.config.max_model_len)
        rate = load.rate_of(requests)
        of_engine = capacity.Load(list(arrivals(requests)), rate)
        engine = goodput_by_role(described.deployment, described.times, of_engine, slo)
        split = Split.of(engine, num_replicas)
        if not split.goodput:
            raise ConfigError(
                f"slo is {self.slo!r}, which no rate of requests meets, of replicas of either "
                "kind; allow more, or leave disaggregation out."
            )
        _log.info("disaggregation: %s", split)
        return split


def _device() -> str:
    """The kind of device here, as planning knows it. Asked of another process, as the devices are
    for the replicas. Raises ConfigError when planning does not know it."""
    asking = [sys.executable, "-c", "import jax; print(jax.devices()[0].device_kind)"]
    told = subprocess.run(asking, capture_output=True, text=True, env=os.environ)
    if told.returncode:
        raise ConfigError(f"JAX finds no devices: {told.stderr.strip().rpartition(chr(10))[2]}")
    kind = told.stdout.splitlines()[-1]
    spec = device_of_kind(kind)
    if spec is None:
        raise ConfigError(
            f"disaggregation is auto, but the step times of {kind} are not known; measure them by "
            "`jaxserve profile`, and give --profile the file."
        )
    return spec.name
