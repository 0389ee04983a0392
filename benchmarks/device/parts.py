"""What is done, in parts. Each runs in a process of its own: a fault of the GPU ends only that."""

from __future__ import annotations

import functools
import itertools
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp

from device import cases, classes, machine, measure, peers_jax, sweep
from device.problem import Arrays, Problem
from device.records import Records
from pallas_kernels import self_check

DEVICE_LOST = 3
"""Exit status of a part after which another process should do what is left of it."""

PROCESSES = 8
"""That try classes of shapes at once."""


class Task(NamedTuple):
    """A key, what gives the fields of its record, and the problem that it tries kernels with."""

    key: str
    run: Callable[[], dict[str, Any]]
    problem: Callable[[], Problem] | None = None


class Settings(NamedTuple):
    """out: where files go. only: operations, or all. until: when to stop, as time.time() counts.
    seed: of all random data."""

    out: Path
    only: tuple[str, ...]
    until: float
    seed: int


def run(part: str, settings: Settings) -> None:
    """Do what of a part has not come to an end yet, until there is no time left.

    Exits with DEVICE_LOST when the device no longer answers.
    """
    records = Records(settings.out / "records.jsonl")
    ended = records.ended(part, self_check.fingerprint())
    # Kernels are looked at here, at their real shapes: their first use need not try them.
    with mock.patch.object(self_check, "why_not", classes.asked):
        for task in PARTS[part](settings):
            if task.key in ended:
                continue
            known = {"fingerprint": self_check.fingerprint()}
            if time.time() > settings.until:
                records.add(part, task.key, "skipped", why="There was no time left.", **known)
                continue
            # Said before: if this process crashes, it is known by which kernels.
            known["classes"] = _classes_of(task)
            records.add(part, task.key, "begun", **known)
            if not attempt(records, part, task, known) and not _answers(part):
                sys.exit(DEVICE_LOST)


def _classes_of(task: Task) -> list[tuple[str, str]]:
    try:
        return [*classes.needed(task.problem())] if task.problem else []
    except Exception:  # Whatever it is, the task itself will fail so, and that is recorded.
        return [*classes.asked.take()]


def attempt(records: Records, part: str, task: Task, known: dict[str, Any]) -> bool:
    """Record what a task finds, or how it fails, and what was `known` before.

    Returns whether it came to an end.
    """
    begin = time.monotonic()
    try:
        found = {"status": "done", **task.run()}
    except ImportError as error:
        found = {"status": "absent", "why": str(error)}
    except Exception as error:  # Whatever a kernel, a compiler or a peer may raise.
        found = {
            "status": "failed",
            "why": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }
    found = {**known, **found}
    status, took_s = found.pop("status"), round(time.monotonic() - begin, 1)
    records.add(part, task.key, status, **found, took_s=took_s)
    return "traceback" not in found


def _answers(part: str) -> bool:
    if part == "peers_torch":
        from device import peers_torch

        return peers_torch.answers()
    try:
        jax.block_until_ready(jnp.zeros(1) + 1)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _machine(settings: Settings) -> Iterator[Task]:
    def config():
        machine.save_target_config(settings.out / "h200.txtpb")
        return {}

    yield Task("versions", machine.versions)
    yield Task("target config", config)
    yield from _measured(cases.LIMITS, settings)


def _smoke(settings: Settings) -> Iterator[Task]:
    return _measured(cases.SMOKE, settings)


def _targets(settings: Settings) -> Iterator[Task]:
    return _measured(cases.TARGETS + cases.PARTS_OF_TARGETS, settings)


def _more(settings: Settings) -> Iterator[Task]:
    return _measured(cases.MORE, settings)


def _layers(settings: Settings) -> Iterator[Task]:
    return _measured(cases.LAYERS, settings)


def _measured(some, settings):
    for case in cases.wanted(some, settings.only):
        yield Task(case.name, functools.partial(_measure, case, settings), case.spec.problem)


def _sweep(settings: Settings) -> Iterator[Task]:
    for key, measured in sweep.tasks(settings.seed):
        yield Task(key, measured)


def _engine(settings: Settings) -> Iterator[Task]:
    try:
        from device import engine_steps
    except ImportError as error:
        yield Task("engine", functools.partial(dict, status="absent", why=str(error)))
        return
    for key, measured in engine_steps.tasks():
        yield Task(key, measured)


def _measure(case, settings):
    return measure.measured(case.spec.problem(), settings.seed)


def _peers_jax(settings: Settings) -> Iterator[Task]:
    def timed(case, peer):
        make = Arrays(settings.seed)
        calls = [peer.inputs(make) for _ in range(case.spec.problem().calls)]
        seconds = measure.time_step(lambda carry, inputs: (carry, peer.compute(inputs)), calls)
        return _of_peer(case, peer, seconds)

    for case in cases.wanted(cases.TARGETS, settings.only):
        for peer in peers_jax.peers(case.spec):
            yield Task(f"{case.name}: {peer.name}", functools.partial(timed, case, peer))


def _peers_torch(settings: Settings) -> Iterator[Task]:
    try:
        from device import peers_torch
    except ImportError as error:
        yield Task("PyTorch", functools.partial(dict, status="absent", why=str(error)))
        return

    def timed(case, peer):
        seconds = peers_torch.seconds_a_call(peer, case.spec.problem().calls)
        return _of_peer(case, peer, seconds)

    for case in cases.wanted(cases.TARGETS, settings.only):
        for peer in peers_torch.peers(case.spec):
            yield Task(f"{case.name}: {peer.name}", functools.partial(timed, case, peer))


def _of_peer(case, peer, seconds):
    return {"case": case.name, "peer": peer.name, "us": 1e6 * seconds}


def _host(settings: Settings) -> Iterator[Task]:
    for leaves in machine.LEAVES:
        yield Task(f"dispatch, {leaves} leaves", functools.partial(machine.dispatch_us, leaves))
    for num_bytes in machine.COPY_BYTES:
        key = f"copies of {num_bytes >> 20} MiB"
        yield Task(key, functools.partial(machine.host_copy_gb_s, num_bytes))


def _classes(share: int, settings: Settings) -> Iterator[Task]:
    """Every PROCESSES-th class."""
    for spec in itertools.islice(classes.specs(settings.only), share, None, PROCESSES):
        yield Task(str(spec), functools.partial(classes.tried, spec), spec.problem)


_CLASSES = {f"classes {share}": functools.partial(_classes, share) for share in range(PROCESSES)}

PARTS: dict[str, Callable[[Settings], Iterator[Task]]] = {
    "machine": _machine,
    "smoke": _smoke,
    **_CLASSES,
    "targets": _targets,
    "sweep": _sweep,
    "layers": _layers,
    "more": _more,
    "engine": _engine,
    "host": _host,
    "peers_jax": _peers_jax,
    "peers_torch": _peers_torch,
}

CALLS: dict[str, tuple[str | tuple[str, ...], ...]] = {
    "check": ("machine", "smoke", tuple(_CLASSES)),
    "speed": ("machine", "targets", "sweep", "more"),
    "engine": ("machine", "engine", "host", "layers", "peers_jax", "peers_torch"),
}
"""The parts of each call, in order. Parts in a tuple run together and take turns on the device:
nearly all that they do is compile. What earlier calls have done is not done again."""
