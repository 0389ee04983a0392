"""Arrival times and lengths of requests: read from a trace, or drawn at random."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.core.errors import ConfigError
from jaxserve.loadgen.lengths import LengthPairs

_BLOCK_TOKENS = 512
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class _Columns(NamedTuple):
    """Names in the header of a CSV trace."""

    time: str
    prompt: str
    output: str


_VIDUR = _Columns("arrived_at", "num_prefill_tokens", "num_decode_tokens")
_AZURE = _Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclasses.dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a load; `arrival_us` is relative to the start of the load.

    `block_ids` identify the prompt's leading blocks of `block_tokens` tokens each: prompts with
    equal leading ids share that prefix. The rest of a prompt is unique.
    """

    arrival_us: int
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    block_tokens: int = _BLOCK_TOKENS


def read_trace(path: Path, gaps_s: Iterator[float] | None = None) -> list[TraceRequest]:
    """The requests of a trace in order of arrival, the first at 0.

    The first character selects CSV or JSON lines. CSV has a header: `arrived_at` (seconds),
    `num_prefill_tokens`, `num_decode_tokens` (Vidur, Agrawal et al. 2024), or `TIMESTAMP` (a date
    and time), `ContextTokens`, `GeneratedTokens` (Azure, Patel et al. 2024). JSON lines have
    `timestamp` (milliseconds), `input_length`, `output_length`, and `hash_ids`, one for each block
    of 512 prompt tokens (Mooncake, Qin et al., FAST 2025). With `gaps_s` requests arrive so far
    apart, in the order in which they would have, or of the lines where these have no time
    (Vidur's traces of lengths). Raises ConfigError, naming the line.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            first = lines.read(1)
            lines.seek(0)
            requests = list(
                _read_json_lines(path, lines)
                if first == "{"
                else _read_csv(path, lines, timed=gaps_s is None)
            )
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}") from error
    if not requests:
        raise ConfigError(f"the trace {path} has no requests.")
    requests.sort(key=lambda request: request.arrival_us)
    begin_us = requests[0].arrival_us
    times_us = (request.arrival_us - begin_us for request in requests)
    if gaps_s is not None:
        times_us = _times_us(gaps_s)
    return [
        dataclasses.replace(request, arrival_us=time_us)
        for request, time_us in zip(requests, times_us)
    ]


def gaps(rate_per_s: float, seed: int, burstiness: float = 1.0) -> Iterator[float]:
    """Endless gaps between requests in seconds, `rate_per_s` requests a second on average, 0 for an
    infinite rate. They are gamma distributed with the shape `burstiness`: 1 for Poisson arrivals,
    less for bursts, infinite for equal gaps.
    """
    draw, mean_s = random.Random(seed), 1 / rate_per_s
    while True:
        if burstiness == 1:
            yield draw.expovariate(rate_per_s) if mean_s else 0.0
        elif not mean_s or math.isinf(burstiness):
            yield mean_s
        else:
            yield draw.gammavariate(burstiness, mean_s / burstiness)


def drawn(
    rate_per_s: float, lengths: LengthPairs, seed: int, burstiness: float = 1.0
) -> Iterator[TraceRequest]:
    """Endless requests of these lengths, whose gaps are those of `gaps`; with an infinite rate all
    arrive at 0."""
    for time_us, tokens in zip(_times_us(gaps(rate_per_s, seed, burstiness)), lengths):
        yield TraceRequest(time_us, *tokens)


@dataclasses.dataclass(frozen=True)
class Fit:
    """Scales a load to a server.

    Arrivals are `rate_scale` times as fast. Lengths, and the blocks that prompts share, are
    multiplied by `length_scale`, then lengths are capped at `max_prompt_tokens` and
    `max_output_tokens`. The load ends after `num_requests`, or with the last arrival before
    `duration_us`.
    """

    rate_scale: float = 1.0
    length_scale: float = 1.0
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    num_requests: int | None = None
    duration_us: int | None = None

    def __call__(self, requests: Iterable[TraceRequest]) -> list[TraceRequest]:
        fitted = map(self._fit, itertools.islice(requests, self.num_requests))
        if self.duration_us is None:
            return list(fitted)
        return list(
            itertools.takewhile(lambda request: request.arrival_us < self.duration_us, fitted)
        )

    def _fit(self, request: TraceRequest) -> TraceRequest:
        return TraceRequest(
            arrival_us=round(request.arrival_us / self.rate_scale),
            prompt_tokens=_at_most(self.max_prompt_tokens, self._scaled(request.prompt_tokens)),
            output_tokens=_at_most(self.max_output_tokens, self._scaled(request.output_tokens)),
            block_ids=request.block_ids,
            block_tokens=self._scaled(request.block_tokens),
        )

    def _scaled(self, num_tokens: int) -> int:
        # Rounded up, so that the blocks of a prompt still cover the same part of it.
        return max(1, math.ceil(num_tokens * self.length_scale))


def _times_us(gaps_s: Iterable[float]) -> Iterator[int]:
    """Times of arrival, from 0 on."""
    for arrival_s in itertools.accumulate(gaps_s, initial=0.0):
        yield round(arrival_s * 1e6)


def _at_most(limit: int | None, num_tokens: int) -> int:
    return num_tokens if limit is None else min(limit, num_tokens)


def _read_csv(path: Path, lines: Iterable[str], timed: bool) -> Iterator[TraceRequest]:
    rows = csv.DictReader(lines, skipinitialspace=True)
    rows.fieldnames = there = [name.strip() for name in rows.fieldnames or ()]
    columns = _AZURE if _AZURE.prompt in there else _VIDUR
    if missing := [name for name in (columns.prompt, columns.output) if name not in there]:
        raise ConfigError(
            f"the trace {path} has no column {missing[0]!r}; a CSV trace has the columns "
            f"{', '.join(_VIDUR)}, or {', '.join(_AZURE)}, and a trace in JSON lines begins with "
            "{."
        )
    if timed and columns.time not in there:
        raise ConfigError(
            f"the trace {path} has no column {columns.time!r}; give request_rate, by which "
            "arrivals are drawn."
        )
    for row in rows:
        try:
            arrival_us = 0.0
            if columns.time in there:
                arrival_us = (_date_us if columns is _AZURE else _seconds_us)(row, columns.time)
            yield _request(arrival_us, _count(row, columns.prompt), _count(row, columns.output))
        except ValueError as error:
            raise ConfigError(f"{path}, line {rows.line_num}: {error}") from error


def _read_json_lines(path: Path, lines: Iterable[str]) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"it is {row!r}; it must be an object, such as {{...}}")
            arrival_us = 1e3 * _time(row, "timestamp", "milliseconds")
            prompt, output = _count(row, "input_length"), _count(row, "output_length")
            yield _request(arrival_us, prompt, output, _block_ids(row))
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error


def _seconds_us(row: Mapping[str, Any], name: str) -> float:
    return 1e6 * _time(row, name, "seconds")


def _time(row: Mapping[str, Any], name: str, unit: str) -> float:
    """Raises ValueError unless it is a finite number, 0 or more."""
    value = _value(row, name)
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be a number of {unit}, 0 or more")
    return number


def _date_us(row: Mapping[str, Any], name: str) -> float:
    """Microseconds since 1970 of a date and time, in UTC if it names no zone."""
    value = _value(row, name)
    try:
        date = datetime.datetime.fromisoformat(value)
    except ValueError:
        raise ValueError(
            f"{name} is {value!r}; it must be a date and time, such as 2023-11-16 18:17:03.979"
        ) from None
    if date.tzinfo is None:
        date = date.replace(tzinfo=datetime.UTC)
    return (date - _EPOCH) / datetime.timedelta(microseconds=1)


def _count(row: Mapping[str, Any], name: str) -> int:
    """Raises ValueError unless it is a whole number, 0 or more; 100.0 is one."""
    value = _value(row, name)
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (number >= 0 and number.is_integer()):
        raise ValueError(f"{name} is {value!r}; it must be a number of tokens, 0 or more")
    return int(number)


def _block_ids(row: Mapping[str, Any]) -> tuple[int, ...]:
    blocks = row.get("hash_ids", [])
    if not (isinstance(blocks, list) and all(type(block) is int for block in blocks)):
        raise ValueError(f"hash_ids is {blocks!r}; it must be a list of whole numbers")
    return tuple(blocks)


def _value(row: Mapping[str, Any], name: str) -> Any:
    if row.get(name) is None:
        raise ValueError(f"it has no {name}")
    return row[name]


def _request(
    arrival_us: float, prompt_tokens: int, output_tokens: int, block_ids: tuple[int, ...] = ()
) -> TraceRequest:
    # Traces contain some empty prompts and outputs, which no endpoint accepts.
    return TraceRequest(round(arrival_us), max(1, prompt_tokens), max(1, output_tokens), block_ids)
