"""Custom ids of a job's lines, and which lines duplicate an earlier one's."""

from __future__ import annotations

import hashlib
from array import array

import numpy as np

from jaxserve.core.errors import RequestError
from jaxserve.offline.lines import LineFields, Lines
from jaxserve.protocol.errors import FieldError

MAX_CUSTOM_ID_CHARS = 512


def custom_id_of(record: LineFields, number: int) -> str:
    """A line's `custom_id`, or else an id derived from its number. Raises RequestError."""
    custom_id = record.get("custom_id")
    if custom_id is None:
        return implied_id(number)
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise FieldError(
            "custom_id",
            f"is {custom_id!r:.80}; it must be a string of 1..{MAX_CUSTOM_ID_CHARS} characters.",
        )
    return custom_id


def implied_id(number: int) -> str:
    """The id of a line without a custom_id."""
    return f"line-{number}"


def duplicates(lines: Lines) -> dict[int, int]:
    """Map the index of each line with a duplicate id to the index of the first line with that id.

    Reads all lines once, and keeps an 8-byte hash of each; lines with equal hashes are read again
    and compared.
    """
    hashes = array("Q")
    for index in range(len(lines)):
        digest = hashlib.blake2b(_id_at(lines, index).encode("utf-8", "surrogatepass"))
        hashes.append(int.from_bytes(digest.digest()[:8], "little"))
    found = np.frombuffer(hashes, np.uint64)
    order = np.argsort(found, kind="stable")
    same_as_next = found[order][:-1] == found[order][1:]
    suspects = np.zeros(len(order), bool)
    suspects[:-1] |= same_as_next
    suspects[1:] |= same_as_next
    first: dict[str, int] = {}
    return {
        index: first[custom_id]
        for index in np.sort(order[suspects]).tolist()
        if first.setdefault(custom_id := _id_at(lines, index), index) != index
    }


def seed_of(custom_id: str, place: int, job_seed: int) -> int:
    """The seed of a line's `place`-th prompt, independent of execution order and host."""
    key = f"{job_seed} {place} {custom_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def _id_at(lines: Lines, index: int) -> str:
    number = lines.number(index)
    try:
        return custom_id_of(lines[index], number)
    except RequestError:
        return implied_id(number)
