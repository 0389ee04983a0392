"""The tables, out of records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from table import print_table

from device import cases
from device.cases import Case

Record = Mapping[str, Any]
Found = Mapping[str, Record]
"""The last record of each key of the parts with cases."""

CASE_PARTS = ("machine", "smoke", "targets", "more", "layers", "dry")


def print_report(records: list[Record]) -> None:
    """All that was found: targets first, failures last."""
    last = {(record["part"], record["key"]): record for record in records}
    found = {key: record for (part, key), record in last.items() if part in CASE_PARTS}
    parts = {part: [r for (p, _), r in last.items() if p == part] for part, _ in last}
    versions = found.get("versions", {})
    for name, version in versions.items():
        if isinstance(version, str) and name not in ("part", "key", "status"):
            print(f"{name}: {version}")
    peers = [*parts.get("peers_jax", ()), *parts.get("peers_torch", ())]
    print()
    print_cases("Smoke", cases.SMOKE, found, peers)
    print_cases("Targets", cases.TARGETS, found, peers)
    print_cases("Limits", cases.LIMITS, found, peers)
    rest = [*cases.PARTS_OF_TARGETS, *cases.MORE, *cases.LAYERS]
    print_cases("More", rest, found, peers)
    print_peers(peers)
    print_sweep(parts.get("sweep", ()))
    print_engine(parts.get("engine", ()))
    print_host(parts.get("host", ()))
    print_classes([record for record in last.values() if record["part"].startswith("classes")])
    print_failures(last.values())


def print_cases(title: str, some: Iterable[Case], found: Found, peers: list[Record]) -> None:
    """One row a case that there is a record of; nothing is printed that was not measured."""
    columns = (
        "op",
        "shape",
        "us",
        "rate",
        "share",
        "target",
        "error",
        "allowed",
        "best peer",
        "its us",
        "peer / ours",
    )
    rows = [_row(case, found[case.name], found, peers) for case in some if case.name in found]
    if rows:
        print_table(title, columns, rows)
        print()


def _row(case, record, found, peers):
    peer, peer_us = best_peer(case, record, peers)
    us = record.get("us")
    if us is None:
        result = (record["status"], None)
    elif case.limit == "matmul":
        result = (us, f"{record['flops'] / us / 1e6:,.0f} TFLOP/s")
    else:
        result = (us, f"{record['bytes_moved'] / us / 1e3:,.0f} GB/s")
    target = None
    if case.target is not None:
        target = f"<= {case.target}" if case.parts else f">= {case.target:.2f}"
    return (
        case.spec.op,
        case.name,
        *result,
        share(case, record, found),
        target,
        _digits(record.get("error")),
        _digits(record.get("tolerance")),
        peer,
        peer_us,
        peer_us / us if peer_us and us else None,
    )


def share(case: Case, record: Record, found: Found) -> float | None:
    """Of what the device can do, or of the sum of its parts; None when one was not measured."""
    if "us" not in record:
        return None
    if case.parts:
        parts = [found.get(part, {}).get("us") for part in case.parts]
        return record["us"] / sum(parts) if all(parts) else None
    best = best_limit(case.limit, found)
    if best is None:
        return None
    work = record["flops"] if case.limit == "matmul" else record["bytes_moved"]
    return work / record["us"] / best


def best_limit(kind: str, found: Found) -> float | None:
    """Work of a microsecond: the best of the limits that are of this kind."""
    rates = []
    for case in cases.LIMITS:
        record = found.get(case.name, {})
        if case.limit == kind and "us" in record:
            work = record["flops"] if kind == "matmul" else record["bytes_moved"]
            rates.append(work / record["us"])
    return max(rates, default=None)


def best_peer(
    case: Case, record: Record, peers: Iterable[Record]
) -> tuple[str | None, float | None]:
    """The quickest of those that were measured, XLA without our kernel among them."""
    times = {r["peer"]: r["us"] for r in peers if r.get("case") == case.name}
    if "xla_us" in record:
        times["XLA"] = record["xla_us"]
    name = min(times, key=times.get, default=None)
    return name, times.get(name)


def print_peers(peers: Iterable[Record]) -> None:
    measured = [(r["case"], r["peer"], r["us"]) for r in peers if "us" in r]
    if measured:
        print_table("Peers", ("shape", "peer", "us"), measured)
        print()


def print_sweep(records: Iterable[Record]) -> None:
    """Times of the sizes that a kernel could take."""
    rows = [(r["kernel"], r["size"], r["value"], r["case"], r["us"]) for r in records if "us" in r]
    if rows:
        print_table("Sizes", ("kernel", "size", "value", "shape", "us"), rows)
        print()


def print_engine(records: Iterable[Record]) -> None:
    """What the engine itself does a second."""
    rows = [
        (record["key"], sampler, tokens_s, record["step_ms"][sampler], record["ready_s"])
        for record in records
        for sampler, tokens_s in record.get("tokens_s", {}).items()
    ]
    if rows:
        print_table("The engine", ("what", "sampling", "tokens/s", "ms a step", "ready, s"), rows)
        print()


def print_host(records: Iterable[Record]) -> None:
    """Dispatches and copies."""
    rows = [
        (record["key"], how, value, unit)
        for record in records
        for field, unit in (("us", "us"), ("gb_s", "GB/s"))
        for how, value in record.get(field, {}).items()
    ]
    if rows:
        print_table("The host's part", ("what", "how", "median", ""), rows)
        print()


def print_classes(records: Iterable[Record]) -> None:
    statuses = [record["status"] for record in records]
    if statuses:
        counts = (f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
        print(f"Classes of shapes tried: {', '.join(counts)}.\n")


def print_failures(records: Iterable[Record]) -> None:
    """What did not end well, a line each; tracebacks are in the file of records."""
    for record in records:
        if record["status"] not in ("done", "compiled", "lowered"):
            why = " ".join(record.get("why", "").split())
            if record["status"] == "wrong":
                why = why or f"error {record['error']:.3g}, allowed {record['tolerance']:.3g}"
            print(f"{record['status']}: {record['part']}: {record['key']}: {why[:300]}")


def _digits(number: float | None) -> str | None:
    return None if number is None else f"{number:.2g}"
