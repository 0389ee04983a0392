"""Kernels in the text of a program compiled for a GPU, and the bytes that each must move."""

from __future__ import annotations

import collections
import dataclasses
import math
import re

_INSTRUCTION = re.compile(
    r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\([^()]*\)|\S+) (?P<op>[\w\-]+)\("
    r"(?P<operands>[^)]*)\)(?P<rest>.*)$"
)
_ARRAY = re.compile(r"([a-z]+\d*)\w*\[([\d,]*)\]")
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "copy-done", "async-done", "all-reduce-done"),
}
_VIEWS = {"bitcast", "reshape"}
_PARTS = {"gather", "dynamic-slice", "slice"}
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}
"""Ops that change their first operand, and the operand that has what is new."""
_WORKSPACE = ("s8", "u8")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A launch: what XLA calls it, what it moves at least, and what should not be there.

    moved_bytes: operands and results, of a gather or an update in place only the part; without
        pages, which an attention kernel reads a part of. copies_pool, transposes: whether it does.
    loops: whether it is a loop or a choice for which the host waits.
    """

    name: str
    kind: str
    source: str
    moved_bytes: int
    copies_pool: bool = False
    transposes: bool = False
    loops: bool = False


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    op: str
    operands: tuple[str, ...]
    rest: str
    root: bool

    @property
    def bytes(self) -> int:
        return sum(_sizes(self.type))


def kernels_of(hlo: str, *, pool_bytes: int) -> list[Kernel]:
    """Kernels of a program, in order. The bodies of loops count as often as they run, if that is
    known, and otherwise once.

    pool_bytes: of an array of pages. Arrays as large count as pages where a kernel written by hand
    takes them, and are not to be copied.
    """
    computations, entry = _computations(hlo)
    return [*_launches(computations, entry, pool_bytes)]


def _computations(hlo):
    found, entry, name = {}, None, None
    for line in hlo.splitlines():
        if header := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
            name = header[2]
            found[name] = {}
            entry = name if header[1] else entry
        elif name and (m := _INSTRUCTION.match(line)):
            operands = tuple(re.findall(r"%?([\w.\-]+)(?:,|$)", m["operands"]))
            found[name][m["name"]] = _Instruction(
                m["name"], m["type"], m["op"], operands, m["rest"], bool(m["root"])
            )
    return found, entry


def _launches(computations, name, pool_bytes):
    own = computations[name]
    for each in own.values():
        called = re.findall(
            r"(?:calls|to_apply|body|branch_computations|true_computation|false_computation)="
            r"\{?((?:%[\w.\-]+(?:, )?)+)\}?",
            each.rest,
        )
        called = re.findall(r"%([\w.\-]+)", " ".join(called))
        if each.op in _FREE:
            continue
        if each.op in ("call", "while", "conditional"):
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', each.rest)
            if each.op != "call" and not trips:
                yield Kernel(each.name, each.op, _source(each), 0, loops=True)
            for body in called * (int(trips[1]) if trips else 1):
                yield from _launches(computations, body, pool_bytes)
            continue
        inputs = [own[operand] for operand in each.operands if operand in own]
        if each.op == "fusion":
            body = computations[called[0]]
            yield Kernel(
                each.name,
                each.op,
                _source(each),
                _fused_bytes(body),
                any(_copies(part, body, pool_bytes) for part in body.values()),
                any(part.op == "transpose" for part in body.values()),
            )
        elif each.op == "custom-call":
            target = re.search(r'custom_call_target="([^"]*)"', each.rest)[1]
            arrays = [b for part in inputs for b in _sizes(part.type) if b < pool_bytes]
            results = [b for b in _sizes(each.type, besides=_WORKSPACE) if b < pool_bytes]
            yield Kernel(each.name, target, _source(each), sum(arrays) + sum(results))
        else:
            moved = each.bytes + sum(part.bytes for part in inputs)
            yield Kernel(
                each.name,
                each.op,
                _source(each),
                moved,
                each.op in ("copy", "copy-start", "transpose") and each.bytes >= pool_bytes,
                each.op == "transpose",
            )


def _copies(part, body, pool_bytes):
    """Whether a part of a fusion makes an array of a pool's size that is no update in place."""
    return part.op in ("copy", "transpose") and part.bytes >= pool_bytes


def _fused_bytes(body):
    """Bytes that a fusion reads of its parameters, and writes of its results."""
    users = collections.defaultdict(list)
    for part in body.values():
        for index, operand in enumerate(part.operands):
            users[operand].append((part, index))

    def read(part):
        moved = 0
        for user, index in users[part.name]:
            if user.op in _VIEWS:
                moved += read(user)
            elif user.op in _PARTS and index == 0:
                moved += user.bytes
            elif user.op in _IN_PLACE and index == 0:
                continue
            else:
                return part.bytes
        return min(moved, part.bytes)

    def written(part):
        while part.op in _VIEWS:
            part = body[part.operands[0]]
        if part.op == "tuple":
            return sum(written(body[operand]) for operand in part.operands)
        if part.op in _IN_PLACE:
            return body[part.operands[_IN_PLACE[part.op]]].bytes
        return part.bytes

    parameters = [part for part in body.values() if part.op == "parameter"]
    (root,) = (part for part in body.values() if part.root)
    return sum(map(read, parameters)) + written(root)


def _sizes(type_, besides=()):
    """Bytes of each array of a type."""
    return [
        math.prod(map(int, filter(None, dims.split(",")))) * max(1, _bits(dtype) // 8)
        for dtype, dims in _ARRAY.findall(type_)
        if dtype not in besides
    ]


def _bits(dtype):
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8


def _source(instruction):
    """What of the model a kernel computes, as JAX named it."""
    found = re.search(r'op_name="([^"]*)"', instruction.rest)
    return found[1].removeprefix("jit(").split(")/", 1)[-1] if found else ""
