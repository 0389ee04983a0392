"""Where weights, KV and activations of a batch job are kept, and how many sequences a block has.

FlexGen's search (2303.06865, section 4.3): for each number of sequences in a step and of steps in a
block, a linear program places shares of weights, KV and activations on the device, on the host and
on disk, so that the job takes the least time; the best of these is the policy. Times are modelled
from measured rates, and are those of a whole model, of which every layer is alike.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from jaxserve.core.arithmetic import cdiv
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

    A decode step of b sequences after c tokens computes for `decode_s[r] + b * c * context_s`
    seconds, r being the smallest of the sizes that holds b. A prefill computes for `prefill_s` a
    token, padding included. Copies have bytes a second. `contention` is the time that a second of
    copies takes from computing: 0 where both overlap, 1 where they take turns.
    """

    decode_s: Mapping[int, float]
    context_s: float
    prefill_s: float
    disk_to_host: float
    host_to_disk: float
    host_to_device: float
    device_to_host: float
    contention: float

    def decode(self, rows: int, context: float) -> float:
        """Seconds that a decode step computes."""
        size = min(size for size in self.decode_s if size >= rows)
        return self.decode_s[size] + rows * context * self.context_s


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Mean tokens of a job's prompts and answers. `outputs` are the tokens of each answer, in the
    order of the job; none if all answers are alike, and so many that every block is full."""

    prompt: float
    output: float
    outputs: Sequence[int] = ()

    @classmethod
    def of(cls, prompt_tokens: int, outputs: Sequence[int]) -> Lengths:
        """Of a job whose prompts have so many tokens together."""
        count = len(outputs)
        return cls(prompt_tokens / count, max(1.0, sum(outputs) / count), tuple(outputs))

    def num_sequences(self, most: int) -> int:
        """All of the job; if these are endless, those of a block of `most`."""
        return len(self.outputs) or most

    def decodes(self, most: int) -> dict[int, float]:
        """How many decodes the job has of each number of sequences, if `most` run at once: where
        one ends, the next begins."""
        if not self.outputs:
            return {most: self.output - 1}
        found: Counter[int] = Counter()
        ends: list[int] = []
        now = 0
        for output in [*self.outputs, *[None] * most]:  # Nothing follows the last ones.
            if ends and (output is None or len(ends) == most):
                found[len(ends)] += ends[0] - now
                now = heapq.heappop(ends)
            if output is not None:
                heapq.heappush(ends, now + output - 1)
        return {sequences: passes for sequences, passes in found.items() if passes}


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


HostKVSeconds = Callable[[int, int, int], tuple[float, float, float]]
"""Of a step of some decodes and a chunk of prefill tokens, each after as many tokens on the host:
seconds of copies to the device and to the host, and of what the host computes."""


class _Phase(NamedTuple):
    """Passes through the layers that are alike. Of one of them: the seconds that the device
    computes, those of copies from disk to host, from host to disk, to the device and from it, and
    those that it waits for the host's attention."""

    passes: float
    compute_s: float
    copies: tuple[float, float, float, float]
    host_s: float


@dataclasses.dataclass(frozen=True)
class Problem:
    """A model, a machine and a job. `work_bytes`: memory of the device for programs and their
    state. `window` layers are on the device where any is not kept there. Prefill steps, which have
    as many prompts as decodes at most, are padded to one of the sizes `prefill_tokens`, ascending;
    without any, the prompts of a block are one pass. Without `host_kv`, KV on the host is copied to
    be attended to."""

    model: ModelBytes
    rates: PolicyRates
    lengths: Lengths
    capacity: MemoryCapacity
    work_bytes: int = 0
    window: int = 2
    prefill_tokens: Sequence[int] = ()
    host_kv: HostKVSeconds | None = None

    def seconds(self, rows: int, steps: int, shares: Shares) -> float:
        """Modelled seconds of an output token, prompts included. In a pass copies overlap with each
        other and, but for contention, with computing."""
        job_s = 0.0
        for passes, compute_s, copies, host_s in self._phases(rows, steps, shares):
            busy_s = compute_s + self.rates.contention * sum(copies) + host_s
            job_s += passes * max(*copies, busy_s)
        return job_s / (self.lengths.num_sequences(rows * steps) * self.lengths.output)

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
        # Unknowns: the shares, then the seconds of a pass of each phase.
        unit = [{place: float(place == one) for place in places} for one in places]
        phases = [*zip(*(self._phases(rows, steps, shares) for shares in unit))]
        limits: list[np.ndarray] = []
        most: list[float] = []
        for tier, capacity in zip(TIERS, self.capacity):
            row = np.zeros(count + len(phases))
            for index, (kind, where) in enumerate(places):
                row[index] = total[kind] if where == tier else 0
            limits.append(row)
            most.append(capacity - (self._fixed if tier == "device" else 0))
        for number, of_places in enumerate(phases):
            copies = np.array([phase.copies for phase in of_places])
            host_s = np.array([phase.host_s for phase in of_places])
            busy_s = self.rates.contention * copies.sum(axis=1) + host_s
            for added, least_s in [*((way, 0.0) for way in copies.T), (busy_s, of_places[0][1])]:
                row = np.zeros(count + len(phases))
                row[:count] = added
                row[count + number] = -1
                limits.append(row)
                most.append(-least_s)
        equal = np.zeros((len(KINDS), count + len(phases)))
        for number, kind in enumerate(KINDS):
            equal[number, [index for index, place in enumerate(places) if place[0] == kind]] = 1
        goal = np.array([0.0] * count + [of_places[0].passes for of_places in phases])
        scale = np.maximum(np.abs(np.array(limits)).max(axis=1), 1e-30)  # Bytes, seconds.
        solved = linprog(
            goal,
            np.array(limits) / scale[:, None],
            np.array(most) / scale,
            equal,
            np.ones(len(KINDS)),
            bounds=[(0, 0 if place in never else 1) for place in places]
            + [(0, None)] * len(phases),
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

    def _phases(self, rows: int, steps: int, shares: Shares) -> list[_Phase]:
        """A job's prefills, and its decodes by the number of sequences in them."""
        prompt, most = self.lengths.prompt, rows * steps
        count = self.lengths.num_sequences(most)
        together = min(most, count)
        tokens = prompt * together
        num_steps, padded = prefill_steps(together, round(prompt), rows, self.prefill_tokens)
        passes = cdiv(num_steps, steps)
        attended = self._prompt_seconds() * together / passes
        compute_s = self.rates.prefill_s * padded / passes
        times = passes * count / together
        phases = [self._phase(shares, times, compute_s, tokens / passes, 0.0, attended)]
        context = prompt + self.lengths.output / 2
        for sequences, times in self.lengths.decodes(most).items():
            full, rest = divmod(sequences, rows)
            sizes = [rows] * full + [rest] * (rest > 0)
            compute_s = sum(self.rates.decode(size, context) for size in sizes)
            attended = sum(self._decode_seconds(size, context) for size in sizes)
            read = sequences * context
            phases.append(self._phase(shares, times, compute_s, sequences, read, attended))
        return phases

    def _decode_seconds(self, rows: int, context: float) -> np.ndarray:
        """As HostKVSeconds, of a decode step all of whose KV is on the host."""
        if self.host_kv is not None:
            return np.array(self.host_kv(rows, 0, round(context)))
        copied = rows * context * self.model.kv_token
        return np.array([copied / self.rates.host_to_device, 0.0, 0.0])

    def _prompt_seconds(self) -> np.ndarray:
        """As HostKVSeconds, of all chunks of a prompt, whose KV goes to the host after each."""
        seconds = np.zeros(3)
        if self.host_kv is not None and self.prefill_tokens:
            prompt, chunk = round(self.lengths.prompt), self.prefill_tokens[-1]
            for start in range(chunk, prompt, chunk):
                seconds += self.host_kv(0, min(chunk, prompt - start), start)
        return seconds

    def _phase(
        self,
        on: Shares,
        passes: float,
        compute_s: float,
        tokens: float,
        read_tokens: float,
        attended: np.ndarray,
    ) -> _Phase:
        """Passes of so many tokens, which attend to `read_tokens` in memory. `attended`: as
        HostKVSeconds, of a pass with all KV on the host; of a share of it as much of that."""
        rates, model = self.rates, self.model
        weights = model.layers * model.layer
        passed = model.layers * tokens * model.activation_token
        written, read = tokens * model.kv_token, read_tokens * model.kv_token
        activations = on["activations", "host"] + on["activations", "disk"]
        from_disk = (
            on["weights", "disk"] * weights
            + on["activations", "disk"] * passed
            + on["kv", "disk"] * read
        )
        to_disk = on["activations", "disk"] * passed + on["kv", "disk"] * written
        to_device = from_disk + on["weights", "host"] * weights + on["activations", "host"] * passed
        to_host = activations * passed + (on["kv", "host"] + on["kv", "disk"]) * written
        to_device_s, to_host_s, host_s = on["kv", "host"] * attended
        copies = (
            from_disk / rates.disk_to_host,
            to_disk / rates.host_to_disk,
            to_device / rates.host_to_device + to_device_s,
            to_host / rates.device_to_host + to_host_s,
        )
        return _Phase(passes, compute_s, copies, host_s)


def prefill_steps(count: int, prompt: int, most: int, sizes: Sequence[int]) -> tuple[int, int]:
    """The number of steps of `count` prompts of so many tokens, if each step has tokens of at most
    `most` of them, and their tokens, padded to one of `sizes`. Without sizes, they are one step."""
    if not sizes:
        return 1, count * prompt
    steps, prompts = [0], 0
    for _ in range(count):
        left = prompt
        while left:
            if steps[-1] == sizes[-1] or prompts == most:
                steps.append(0)
                prompts = 0
            chunk = min(left, sizes[-1] - steps[-1])
            steps[-1] += chunk
            prompts += 1
            left -= chunk
    return len(steps), sum(next(size for size in (0, *sizes) if size >= step) for step in steps)
