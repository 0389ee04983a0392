"""Correctness and speed of the kernels on an H200, relative to the machine's limits.

In this order: the machine, and its real configuration for compilers; the two ceilings, a copy and a
matrix product; every kernel against exact results and then timed, targets first; the best
alternatives on the machine; copies to and from the host, dispatches, layers unrolled and in a loop;
more shapes; and last as many shape classes as time allows, for `pallas_kernels/verified.json`.

Parts run in separate processes, so that a crash or a kernel that hangs costs one case. Results are
written to DIR as they are measured: `records.jsonl`, `verified.json` (the committed one, with the
new results), `h200.txtpb` (the device, for compilers) and `log.txt`. Peers that are not installed
are listed as absent. Nothing is installed or fetched.

    PYTHONPATH=. python benchmarks/h200.py --out DIR
    PYTHONPATH=. python benchmarks/h200.py --dry

With --dry the same programs are built, and compiled for a described H200, which needs
jax-cuda13-plugin; without it programs are only lowered. No device is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPORT_S = 10
"""Kept back for the end."""

STUCK_S = 100
"""Without any news after which a part is ended; compilers of peers take up to a minute."""

OPS = ("paged_attention", "write_kv", "page_copy", "quantized_matmul", "decode_layers")

SHARES = {"peers_jax": 0.3, "peers_torch": 0.5, "host": 0.3, "layers": 0.5, "more": 0.6}
"""Of the time that is left, what parts may take at most; others may take all."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="directory for what was found; a temporary one")
    parser.add_argument("--minutes", type=float, default=9, help="nothing is begun after that")
    parser.add_argument("--only", nargs="+", default=(), choices=OPS, help="operations")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31, help="of all data")
    parser.add_argument("--part", help="only this part, and in this process")
    parser.add_argument("--dry", action="store_true", help="compile everything, run nothing")
    arguments = parser.parse_args()
    arguments.until = time.time() + 60 * arguments.minutes
    arguments.out = arguments.out or Path(tempfile.mkdtemp(prefix="h200-"))
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.dry:
        sys.exit(rehearse(arguments))
    elif arguments.part:
        run_part(arguments)
    else:
        sys.exit(run_all(arguments))


def rehearse(arguments: argparse.Namespace) -> int:
    """Compile everything; 1 if anything failed, else 0."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from device import describe, parts, report
    from device.records import Records

    with tempfile.TemporaryDirectory() as directory:
        records = Records(Path(directory) / "records.jsonl")
        for key, task in describe.tasks(tuple(arguments.only)):
            parts.attempt(records, "dry", key, task)
            print(f"{records.read()[-1]['status']}: {key}", file=sys.stderr, flush=True)
        found = records.read()
    report.print_report(found)
    statuses = [record["status"] for record in found]
    counts = (f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
    print(f"Of {len(found)}: {', '.join(counts)}.")
    return int(not {*statuses} <= {describe.DONE, "refused"})


def run_part(arguments: argparse.Namespace) -> None:
    if arguments.part == "peers_torch":
        os.environ["JAX_PLATFORMS"] = "cpu"  # The device is PyTorch's.
    from device import parts

    settings = parts.Settings(arguments.out, tuple(arguments.only), arguments.until, arguments.seed)
    parts.run(arguments.part, settings)


def run_all(arguments: argparse.Namespace) -> int:
    """All parts and the report; 1 if anything of ours failed or was wrong, else 0."""
    from device import parts, report
    from device.records import Records

    arguments.until -= REPORT_S
    path = arguments.out / "records.jsonl"
    path.unlink(missing_ok=True)  # of an earlier run
    records = Records(path)

    def finish(part: str) -> None:
        left = arguments.until - time.time()
        if left <= 0:
            records.add(part, "all of it", "skipped", why="There was no time left.")
        until = time.time() + left * SHARES.get(part, 1)
        while supervise(part, until, arguments, records):
            pass

    for part in parts.PARTS:
        finish(part)
        if part == "machine" and not any(r.get("platform") == "gpu" for r in records.of(part)):
            sys.exit(f"There is no GPU here, see {arguments.out}. Only --dry needs none.")
    with ThreadPoolExecutor(len(parts.SHARED_PARTS)) as pool:
        list(pool.map(finish, parts.SHARED_PARTS))
    found = records.read()
    write_verified(arguments.out / "verified.json", found)
    report.print_report(found)
    print(f"\nAll of it is in {arguments.out}.")
    bad = (record for record in found if record["status"] in ("failed", "wrong", "crashed"))
    return int(any(not record["part"].startswith("peers") for record in bad))


def supervise(part, until, arguments, records) -> bool:
    """One process of a part, ended when it is stuck or late; whether another must go on."""
    if time.time() > until:
        return False
    command = [sys.executable, __file__, "--part", part, "--out", str(arguments.out)]
    command += ["--minutes", str((until - time.time()) / 60), "--seed", str(arguments.seed)]
    command += ["--only", *arguments.only] if arguments.only else []
    # Parts that share the device must not each take most of its memory.
    memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if part.startswith("classes") else {}
    before = len(records.of(part))
    latest = min(until + STUCK_S, arguments.until + REPORT_S)
    with (arguments.out / "log.txt").open("a") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | memory
        )
        seen, since = before, time.time()
        while process.poll() is None:
            time.sleep(0.2)
            for record in records.of(part)[seen:]:
                seen, since = seen + 1, time.time()
                if record["status"] != "begun":
                    print(f"{record['status']}: {part}: {record['key']}", flush=True)
            if time.time() - since > STUCK_S or time.time() > latest:
                process.kill()
    if process.returncode == 0:
        return False
    found = records.of(part)[before:]
    last = found[-1] if found else {"key": "all of it", "status": "begun"}
    if last["status"] == "begun" and time.time() > latest:
        records.add(part, last["key"], "skipped", why="It took too long.")
    elif last["status"] == "begun":
        why = f"Its process ended with status {process.returncode}, see log.txt."
        records.add(part, last["key"], "crashed", why=why)
    return bool(found)


def write_verified(path: Path, found: list[dict]) -> None:
    from device import classes

    from pallas_kernels import self_check

    devices = [record["device"] for record in found if "device" in record]
    if devices:
        verified = classes.verified(self_check.verified(), devices[0], found)
        path.write_text(json.dumps(verified, indent=2) + "\n")


if __name__ == "__main__":
    main()
