"""Correctness and speed on an H200, relative to the machine's limits: three calls of ten minutes.

`check`: the machine, its real configuration for compilers, and its ceilings (reads, copies, a
matrix product); every kernel once, small, with what is most likely to break; then as many classes
of shapes as time allows.
`speed`: kernels at real shapes, targets first, against exact results and timed; then the sizes that
kernels could take.
`engine`: the engine itself at 8B with random weights, copies to and from the host, dispatches,
layers unrolled and in a loop, and the best alternatives on the machine.

Each ends with what it has, and goes on with the rest when it is called again with the same DIR, in
which each finds what the others did. Parts run in separate processes, so that a crash or a kernel
that hangs costs one case. Results are written to DIR as they are measured: `records.jsonl`,
`verified.json` and `tuned.json` (the committed ones, with the new results), `h200.txtpb` (the
device, for compilers) and `log.txt`. What is of other sources or compilers is done again. Peers
that are not installed are listed as absent. Nothing is installed or fetched.

    PYTHONPATH=. python benchmarks/h200.py check --out DIR
    PYTHONPATH=. python benchmarks/h200.py speed --out DIR
    PYTHONPATH=. python benchmarks/h200.py engine --out DIR
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
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPORT_S = 10
"""Kept back for the end."""

STUCK_S = 100
"""Without any news after which a part is ended; compilers of peers take up to a minute."""

STUCK_PARTS_S = {"smoke": 60, "engine": 300}
"""The same of some parts: an engine compiles all its programs and makes 16 GB of weights."""

CALLS = ("check", "speed", "engine")
OPS = (
    *("paged_attention", "write_kv", "page_copy", "quantized_matmul", "add_and_norm"),
    "decode_layers",
)

SHARES = {"smoke": 0.6, "targets": 0.4, "sweep": 0.5, "engine": 0.6, "host": 0.2, "peers_jax": 0.4}
"""Of the time that is left, what parts may take at most; others may take all."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("call", nargs="?", choices=CALLS, help="which of the three")
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
    elif arguments.call is None:
        parser.error(f"which call? One of {', '.join(CALLS)}, or --dry.")
    else:
        sys.exit(run_all(arguments))


def rehearse(arguments: argparse.Namespace) -> int:
    """Compile everything; 1 if anything failed, else 0."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from device import describe, parts, report
    from device.records import Records

    with tempfile.TemporaryDirectory() as directory:
        records = Records(Path(directory) / "records.jsonl")
        for task in describe.tasks(tuple(arguments.only)):
            parts.attempt(records, "dry", task, {})
            print(f"{records.read()[-1]['status']}: {task.key}", file=sys.stderr, flush=True)
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
    records = Records(arguments.out / "records.jsonl")

    def finish(part: str) -> None:
        left = arguments.until - time.time()
        if left <= 0:
            print(f"skipped: {part}: There was no time left.")
        until = time.time() + left * SHARES.get(part, 1)
        while supervise(part, until, arguments, records):
            pass

    for some in parts.CALLS[arguments.call]:
        if isinstance(some, tuple):
            with ThreadPoolExecutor(len(some)) as pool:
                list(pool.map(finish, some))
            continue
        finish(some)
        if some == "machine" and not any(r.get("platform") == "gpu" for r in records.of(some)):
            sys.exit(f"There is no GPU here, see {arguments.out}. Only --dry needs none.")
    found = records.read()
    write_tables(arguments.out, found)
    report.print_report(found)
    print(f"\nAll of it is in {arguments.out}.")
    last = {(record["part"], record["key"]): record for record in found}.values()
    bad = (record for record in last if record["status"] in ("failed", "wrong", "crashed"))
    return int(any(not record["part"].startswith("peers") for record in bad))


def supervise(part, until, arguments, records) -> bool:
    """One process of a part, ended when it is stuck or late; whether another must go on."""
    if time.time() > until:
        return False
    stuck_s = STUCK_PARTS_S.get(part, STUCK_S)
    command = [sys.executable, __file__, "--part", part, "--out", str(arguments.out)]
    command += ["--minutes", str((until - time.time()) / 60), "--seed", str(arguments.seed)]
    command += ["--only", *arguments.only] if arguments.only else []
    # Parts that share the device must not each take most of its memory.
    memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if part.startswith("classes") else {}
    before = len(records.of(part))
    latest = min(until + stuck_s, arguments.until + REPORT_S)
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
                    write_tables(arguments.out, records.read())
            if time.time() - since > stuck_s or time.time() > latest:
                process.kill()
    if process.returncode == 0:
        return False
    found = records.of(part)[before:]
    last = found[-1] if found else {"key": "all of it", "status": "begun"}
    known = {name: last[name] for name in ("fingerprint", "classes") if name in last}
    if last["status"] == "begun" and time.time() > latest:
        records.add(part, last["key"], "skipped", why="It took too long.", **known)
    elif last["status"] == "begun":
        why = f"Its process ended with status {process.returncode}, see log.txt."
        records.add(part, last["key"], "crashed", why=why, **known)
        write_tables(arguments.out, records.read())
    return bool(found)


def write_tables(out: Path, found: list[dict]) -> None:
    """`verified.json` and `tuned.json`: whole at any moment, whatever ends this process."""
    from device import classes, sweep

    from pallas_kernels import self_check, tuning

    machines = [record for record in found if "device" in record]
    if not machines:
        return
    device, fingerprint = machines[-1]["device"], self_check.fingerprint()
    own = [record for record in found if record.get("fingerprint") == fingerprint]
    tables = {
        "verified.json": classes.verified(self_check.verified(), device, fingerprint, own),
        "tuned.json": sweep.tuned(tuning.table(), device, own),
    }
    with _writing:
        for name, table in tables.items():
            partial = out / f"{name}.partial"
            partial.write_text(json.dumps(table, indent=2) + "\n")
            partial.replace(out / name)


_writing = threading.Lock()


if __name__ == "__main__":
    main()
