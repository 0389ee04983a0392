"""A random engine that does nothing but write its log, on a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from jaxserve.core.events import EventLog


class VirtualClock:
    def __init__(self) -> None:
        self.us = 0

    def __call__(self) -> int:
        return self.us

    def advance(self, us: int) -> None:
        self.us += us


@dataclass
class Life:
    """What the session itself knows of one of its sequences."""

    arrival_us: int
    prompt_tokens: int
    output_tokens: int
    state: str = "waiting"
    prefilled: int = 0
    scheduled_tokens: int = 0
    admitted_us: int | None = None
    preemptions: int = 0
    token_us: list[int] = field(default_factory=list)
    finish_us: int | None = None
    reason: str | None = None


class Session:
    """Runs random requests, one step ahead of the host, and tells the log."""

    def __init__(self, log: EventLog, clock: VirtualClock, random: Random):
        self.log, self.clock, self.random = log, clock, random
        self.lives: dict[int, Life] = {}
        self.steps = 0
        self._in_flight: list[tuple[int, list[int]]] = []

    def run(self, requests: int, drain: bool = True) -> Session:
        for _ in range(requests):
            self._arrive()
            for _ in range(self.random.randint(0, 4)):
                self._step()
        while drain and (self._in_flight or any(life.reason is None for life in self._all())):
            self._step()
        return self

    def _all(self) -> list[Life]:
        return list(self.lives.values())

    def _pass(self) -> None:
        self.clock.advance(self.random.randint(0, 2000))

    def _in(self, *states: str) -> list[int]:
        return [sequence for sequence, life in self.lives.items() if life.state in states]

    def _arrive(self) -> None:
        self._pass()
        sequence = len(self.lives)
        life = Life(self.clock.us, self.random.randint(1, 40), self.random.randint(1, 6))
        self.lives[sequence] = life
        self.log.arrived(sequence, f"request-{sequence}", life.prompt_tokens)

    def _end(self, sequence: int, reason: str) -> None:
        life = self.lives[sequence]
        life.state, life.reason, life.finish_us = "ended", reason, self.clock.us
        if reason == "error":
            self.log.failed(sequence, "out of luck")
        else:
            self.log.finished(sequence, reason)

    def _step(self) -> None:
        dispatched = self._dispatch()
        if len(self._in_flight) > dispatched:
            self._collect()
        for sequence in self._in("waiting", "preempted", "running"):
            if self.random.random() < 0.02:
                self._end(sequence, self.random.choice(["abort", "error"]))

    def _dispatch(self) -> bool:
        begin_us = self.clock.us
        self._pass()
        if self._in("running") and self.random.random() < 0.1:
            sequence = self.random.choice(self._in("running"))
            life = self.lives[sequence]
            life.state, life.prefilled = "preempted", 0
            life.preemptions += 1
            self.log.preempted(sequence)
        for sequence in self._in("waiting", "preempted")[: self.random.randint(0, 2)]:
            life = self.lives[sequence]
            if life.state == "waiting":
                life.admitted_us = self.clock.us
                life.prefilled = self.random.randint(0, life.prompt_tokens - 1)
                self.log.admitted(sequence, cached_tokens=life.prefilled)
            else:
                life.scheduled_tokens = len(life.token_us)
                self.log.resumed(sequence)
            life.state = "running"
        scheduled_us = self.clock.us
        decodes, prefill, samples = [], [], []
        for sequence in self._in("running"):
            life = self.lives[sequence]
            if life.scheduled_tokens == life.output_tokens:
                continue
            left = life.prompt_tokens - life.prefilled
            if left:
                tokens = min(left, 16)
                life.prefilled += tokens
                prefill.append((sequence, tokens))
            else:
                decodes.append(sequence)
            if life.prefilled == life.prompt_tokens:
                life.scheduled_tokens += 1
                samples.append(sequence)
        if not decodes and not prefill:
            return False
        self._pass()
        packed_us = self.clock.us
        self._pass()
        self.log.dispatched(
            self.steps,
            f"decode{len(decodes)}",
            begin_us=begin_us,
            scheduled_us=scheduled_us,
            packed_us=packed_us,
            decode_rows=len(decodes),
            prefill=prefill,
            padded_tokens=self.random.randint(0, 3),
            pages_used=len(self._in("running")),
            pages_total=100,
        )
        self._in_flight.append((self.steps, samples))
        self.steps += 1
        return True

    def _collect(self) -> None:
        step, samples = self._in_flight.pop(0)
        begin_us = self.clock.us
        self._pass()
        received = [sequence for sequence in samples if self.lives[sequence].reason is None]
        ready_us = self.clock.us
        for sequence in received:
            self.lives[sequence].token_us.append(ready_us)
        self._pass()  # Looking at the tokens takes time.
        self.log.collected(step, received, begin_us=begin_us, ready_us=ready_us)
        for sequence in received:
            life = self.lives[sequence]
            if len(life.token_us) >= life.output_tokens:
                self._end(sequence, "length")
