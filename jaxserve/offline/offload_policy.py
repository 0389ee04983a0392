"""Where weights, KV and activations of a batch job are kept, and how many sequences a block has.

FlexGen's search (2303.06865, section 4.3): for each number of sequences in a step and of steps in a
block, a linear program places shares of weights, KV and activations on the device, on the host and
on disk, so that a token takes the least time; the best of these is the policy. Times are modelled
from measured rates, and are those of a whole model, of which every layer is alike.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import numpy as np

from jaxserve.core.errors import ConfigError

OffloadTier = Literal["device", "host", "disk"]
TIERS: tuple[OffloadTier, ...] = ("device", "host", "disk")
KINDS = ("weights", "kv", "activations")


@dataclasses.dataclass(frozen=True)
class ModelBytes:
    """Number of layers, and bytes of one, of the parameters outside them, which are always on the
    device, of the KV of a token, and of a token's activations between two layers."""

    layers: int
    layer: int
    outside: int
    kv_token: int
    activation_token: int


@dataclasses.dataclass(frozen=True)
class PolicyRates:
    """What a machine does in a second, as measured.

    A decode step of b sequences after c tokens computes for `step_s + b * (row_s + c * context_s)`
    seconds, and a prefill for `prefill_s` a token. Copies have bytes a second. `contention` is the
    time that a second of copies takes from computing: 0 where both overlap, 1 where they take
    turns.
    """

    step_s: float
    row_s: float
    context_s: float
    prefill_s: float
    disk_to_host: float
    host_to_disk: float
    host_to_device: float
    device_to_host: float
    contention: float


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Mean tokens of a job's prompts and answers."""

    prompt: float
    output: float


class MemoryCapacity(NamedTuple):
    """Bytes that each tier may hold."""

    device: float
    host: float
    disk: float


Shares = Mapping[tuple[str, OffloadTier], float]
"""Of each kind, the share on each tier; those of a kind add up to 1."""


@dataclasses.dataclass(frozen=True)
class OffloadPolicy:
    """`steps` of `rows` sequences each in a block, and where what they need is. `token_s`: modelled
    time of an output token, prompts included."""

    rows: int
    steps: int
    shares: Shares
    token_s: float


@dataclasses.dataclass(frozen=True)
class Problem:
    """A model, a machine and a job. `work_bytes`: memory of the device for programs and their
    state. `window` layers are on the device where any is not kept there."""

    model: ModelBytes
    rates: PolicyRates
    lengths: Lengths
    capacity: MemoryCapacity
    work_bytes: int = 0
    window: int = 2

    def seconds(self, rows: int, steps: int, shares: Shares) -> float:
        """Modelled seconds of an output token, prompts included."""
        prefill_s, decode_s = (
            _longest(self.rates, compute_s, copies)
            for compute_s, copies in self._phases(rows, steps, shares)
        )
        output = self.lengths.output
        return (prefill_s + (output - 1) * decode_s) / (rows * steps * output)

    def held(self, rows: int, steps: int, shares: Shares) -> MemoryCapacity:
        """Bytes on each tier when all sequences have their last token."""
        total = self._totals(rows, steps)
        held = [sum(shares[kind, tier] * total[kind] for kind in KINDS) for tier in TIERS]
        held[0] += self._fixed
        return MemoryCapacity(*held)

    def fits(self, rows: int, steps: int, shares: Shares, slack: float = 1e-9) -> bool:
        """Whether no tier holds more than it may."""
        held = self.held(rows, steps, shares)
        return all(own <= most * (1 + slack) for own, most in zip(held, self.capacity))

    def solve(
        self, rows: int, steps: int, never: Iterable[tuple[str, OffloadTier]] = ()
    ) -> OffloadPolicy | None:
        """The shares with the least time, none of those in `never`; None if nothing fits."""
        from scipy.optimize import linprog  # SciPy takes a quarter of a second.

        places = [*itertools.product(KINDS, TIERS)]
        never = set(never)
        count = len(places)
        total = self._totals(rows, steps)
        # Unknowns: the shares, then the seconds of the prefill and of a decode of the block.
        limits: list[np.ndarray] = []
        most: list[float] = []
        for tier, capacity in zip(TIERS, self.capacity):
            row = np.zeros(count + 2)
            for index, (kind, where) in enumerate(places):
                row[index] = total[kind] if where == tier else 0
            limits.append(row)
            most.append(capacity - (self._fixed if tier == "device" else 0))
        unit = [{place: float(place == one) for place in places} for one in places]
        phases = [self._phases(rows, steps, shares) for shares in unit]
        for phase in range(2):
            compute_s = phases[0][phase][0]
            copies = np.array([phases[index][phase][1] for index in range(count)])
            rows_of = [*copies.T, self.rates.contention * copies.sum(axis=1)]
            for number, copied in enumerate(rows_of):
                row = np.zeros(count + 2)
                row[:count] = copied
                row[count + phase] = -1
                limits.append(row)
                most.append(-compute_s if number == len(rows_of) - 1 else 0)
        equal = np.zeros((len(KINDS), count + 2))
        for number, kind in enumerate(KINDS):
            equal[number, [index for index, place in enumerate(places) if place[0] == kind]] = 1
        output = self.lengths.output
        goal = np.zeros(count + 2)
        goal[count:] = 1, output - 1
        scale = np.maximum(np.abs(np.array(limits)).max(axis=1), 1e-30)  # Bytes, seconds.
        solved = linprog(
            goal,
            np.array(limits) / scale[:, None],
            np.array(most) / scale,
            equal,
            np.ones(len(KINDS)),
            bounds=[(0, 0 if place in never else 1) for place in places] + [(0, None)] * 2,
            method="highs",
        )
        if not solved.success:
            return None
        shares = {place: min(1.0, max(0.0, float(x))) for place, x in zip(places, solved.x[:count])}
        return OffloadPolicy(rows, steps, shares, self.seconds(rows, steps, shares))

    def best(
        self,
        rows: Iterable[int],
        steps: Iterable[int],
        never: Iterable[tuple[str, OffloadTier]] = (),
    ) -> OffloadPolicy:
        """The fastest policy; of equal ones, that with the fewest sequences at once. Raises
        ConfigError when none fits."""
        never = tuple(never)
        found = [self.solve(*sizes, never) for sizes in itertools.product(rows, steps)]
        policies = [policy for policy in found if policy is not None]
        if not policies:
            raise ConfigError(
                f"offload is 'auto', but no placement fits {self.capacity.device:,.0f} bytes of "
                f"the device, {self.capacity.host:,.0f} of the host and {self.capacity.disk:,.0f} "
                "of disk; set memory_utilization to more, or max_model_len to less."
            )
        return min(policies, key=lambda policy: (policy.token_s, policy.rows * policy.steps))

    def _totals(self, rows: int, steps: int) -> dict[str, float]:
        """Bytes of each kind, of a block at its longest."""
        tokens = self.lengths.prompt + self.lengths.output
        sequences = rows * steps
        return {
            "weights": self.model.layers * self.model.layer,
            "kv": sequences * tokens * self.model.kv_token,
            "activations": sequences * self.model.activation_token,
        }

    @property
    def _fixed(self) -> float:
        """Bytes of the device that no share is of."""
        return self.model.outside + self.window * self.model.layer + self.work_bytes

    def _phases(
        self, rows: int, steps: int, shares: Shares
    ) -> list[tuple[float, tuple[float, float, float, float]]]:
        """Of a block's prefill and of one of its decodes: seconds of computing, and seconds of each
        way of copies: disk to host, host to disk, host to device, device to host."""
        rates, sequences = self.rates, rows * steps
        prompt, output = self.lengths.prompt, self.lengths.output
        context = prompt + output / 2
        weights = self.model.layers * self.model.layer
        activations = self.model.layers * sequences * self.model.activation_token
        compute = (
            rates.prefill_s * prompt * sequences,
            steps * (rates.step_s + rows * (rates.row_s + context * rates.context_s)),
        )
        tokens = (prompt, 1.0)
        read_kv = (0.0, sequences * context * self.model.kv_token)
        phases = []
        for phase in range(2):
            written = sequences * tokens[phase] * self.model.kv_token
            passed = activations * tokens[phase]
            moved = {
                tier: (
                    shares["weights", tier] * weights
                    + shares["kv", tier] * read_kv[phase]
                    + shares["activations", tier] * passed,
                    shares["kv", tier] * written + shares["activations", tier] * passed,
                )
                for tier in ("host", "disk")
            }
            copies = (
                moved["disk"][0] / rates.disk_to_host,
                moved["disk"][1] / rates.host_to_disk,
                (moved["host"][0] + moved["disk"][0]) / rates.host_to_device,
                (moved["host"][1] + moved["disk"][1]) / rates.device_to_host,
            )
            phases.append((compute[phase], copies))
        return phases


def _longest(rates: PolicyRates, compute_s: float, copies: tuple[float, ...]) -> float:
    """Seconds of work whose copies overlap with each other and, but for contention, with
    computing."""
    return max(*copies, compute_s + rates.contention * sum(copies))
