"""What the benchmark on a device does with what it finds, without a device."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import h200  # noqa: E402  (found by the path above)
from device import cases, classes, errors, measure, report, sweep  # noqa: E402
from device.attention import Attention  # noqa: E402
from device.packed_weights import PackedMatmul  # noqa: E402
from device.problem import Arrays, Problem  # noqa: E402
from device.records import Records  # noqa: E402

from pallas_kernels import backends, self_check  # noqa: E402
from pallas_kernels.quantized_matmul import FP8  # noqa: E402


def doubling(kernel, tolerance=0.0):
    """A problem of doubling numbers, and adding 1 to a carry in place."""

    def exact(carry, x):
        return carry + 1, 2 * x

    return Problem(
        carry=lambda make: make.known(np.zeros(3)),
        inputs=lambda make: make.random(4, 8, dtype="float32"),
        kernel=kernel,
        bytes_moved=1 << 29,
        exact=exact,
        error=errors.absolute,
        tolerance=tolerance,
    )


def test_a_right_kernel_is_timed():
    problem = doubling(lambda carry, x: (carry + 1, x + x))
    found = measure.measured(problem, seed=3)
    assert problem.calls == 2
    assert found["status"] == "done" and found["error"] == 0 and found["us"] > 0


@pytest.mark.parametrize(
    "kernel",
    [
        lambda carry, x: (carry + 1, (2 * x).at[1, 2].add(0.01)),
        lambda carry, x: (carry + 1, (2 * x).at[3, 7].set(jnp.nan)),
        lambda carry, x: (carry, 2 * x),
    ],
    ids=["result", "nan", "carry"],
)
def test_a_wrong_kernel_is_called_wrong(kernel):
    assert measure.measured(doubling(kernel, tolerance=1e-3), seed=3)["status"] == "wrong"


def test_errors_are_relative_to_their_row():
    exact = jnp.array([[100.0, -100], [0.01, -0.01], [0, 0]])
    assert errors.in_rows(exact, exact) == 0
    assert errors.in_rows(exact.at[1, 0].add(0.001), exact) == pytest.approx(0.1, rel=1e-3)
    assert errors.in_rows(exact.at[0, 0].add(0.001), exact) < 1e-4
    assert errors.in_rows(exact.at[2, 0].add(1e-9), exact) > 1


def test_log_sum_exps_of_nothing_must_be_found_so():
    exact = jnp.array([1.0, -jnp.inf])
    assert errors.absolute(exact, exact) == 0
    assert errors.absolute(jnp.array([1.0, -1e30]), exact) == jnp.inf


def test_moved_bits_are_counted_whatever_numbers_they_are():
    bits = np.full(5, 0x7FC0, np.uint16)
    others = bits ^ np.uint16([0, 0, 1, 0, 0])
    nans, other_nans = (jnp.asarray(each.view(jnp.bfloat16)) for each in (bits, others))
    assert errors.differing([nans], [nans]) == 0
    assert errors.differing([nans], [other_nans]) == 1


def test_attention_counts_what_is_seen():
    ragged = Attention((5, 3), ((7, 2),), heads=4, kv_heads=2, head_dim=8, page_size=4)
    assert ragged.seen == 5 + 3 + 6 + 7
    assert ragged.pages.num_pages == 1 + 2 + 1 + 2
    windowed = Attention((5, 3), ((7, 2),), window=4)
    assert windowed.seen == 4 + 3 + 4 + 4
    token_bytes = windowed.pages.page_bytes // windowed.page_size
    assert windowed.bytes_moved == (4 + 3 + 5) * token_bytes + 2 * 4 * 32 * 128 * 2


def test_rows_own_different_pages():
    *_, batch = Attention((100, 40), ((130, 30),), page_size=16).arguments(Arrays(0))
    owned = np.asarray(batch.tables)
    assert sorted(owned[owned > 0]) == list(range(1, 1 + 7 + 3 + 9))
    np.testing.assert_array_equal(batch.starts, [0, 1, 2])


def test_limits_targets_and_names_belong_together():
    names = [case.name for case in cases.ALL]
    assert len(set(names)) == len(names)
    assert all(part in names for case in cases.ALL for part in case.parts)
    assert {case.spec.op for case in cases.ALL} - {case.spec.op for case in cases.LIMITS} == set(
        h200.OPS
    )


def case_record(name, us, **more):
    work = {"bytes_moved": 8_000_000, "flops": 4_000_000}
    return {"part": "targets", "key": name, "status": "done", "us": us, **work, **more}


def test_shares_are_of_what_was_measured(capsys):
    decode, *_, gather, _, _, _ = cases.TARGETS
    assert decode.limit == "read"
    mixed = next(case for case in cases.TARGETS if case.parts)
    found = {
        "read": case_record("read", 2.0),
        "copy": case_record("copy", 1.0),
        decode.name: case_record(decode.name, 4.0, xla_us=40.0),
    }
    assert report.share(decode, found[decode.name], found) == 0.5
    assert report.share(mixed, case_record(mixed.name, 6.0), found) is None
    found |= {name: case_record(name, us) for name, us in zip(mixed.parts, (2.0, 3.0))}
    assert report.share(mixed, case_record(mixed.name, 6.0), found) == 1.2
    peer = {"part": "peers_torch", "key": "a peer", "status": "done", "case": decode.name}
    report.print_report([*found.values(), peer | {"peer": "torch", "us": 8.0}])
    row = next(line for line in capsys.readouterr().out.splitlines() if decode.name in line)
    cells = [cell.strip() for cell in row.split("|")][3:]
    assert cells == [
        *("4.00", "2,000 GB/s", "0.50", ">= 0.92", "-", "-", "torch", "8.00", "2.00"),
        "",
    ]
    assert gather.name not in row


def test_only_what_was_found_right_is_verified():
    """At real shapes or by a check, and by what is installed now. A crash costs its own classes."""
    kind = "NVIDIA H200"
    known = {kind: {"now": {"merge": ["a"], "paged_attention": ["b", "c"]}, "before": {"x": ["y"]}}}
    records = [
        {"part": "classes 0", "status": "done", "classes": [("paged_attention", "d")]},
        {"part": "targets", "status": "done", "classes": [["paged_attention", "e"]]},
        {"part": "classes 0", "status": "wrong", "classes": [("paged_attention", "b")]},
        {"part": "targets", "status": "wrong", "classes": [("paged_attention", "d"), ("new", "e")]},
        {"part": "more", "status": "crashed", "classes": [("new", "f"), ("merge", "a")]},
        {"part": "more", "status": "begun", "classes": [("new", "g")]},
        {"part": "peers_jax", "status": "crashed"},
    ]
    records = [record | {"fingerprint": "now"} for record in records]
    records.append({"part": "more", "status": "done", "classes": [("old", "h")]})
    found = classes.verified(known, kind, "now", records)
    assert found == {kind: {"now": {"paged_attention": ["c", "e"]}}}
    assert known[kind]["now"]["paged_attention"] == ["b", "c"]
    found = classes.verified(known, kind, "next", [])
    assert found == {kind: {"next": {}}}


def test_what_is_cut_off_is_done_again(tmp_path):
    """And what was done with other sources or compilers; nothing else."""
    records = Records(tmp_path / "records.jsonl")
    for key, statuses in {
        "done": ("begun", "done"),
        "crashed": ("begun", "crashed"),
        "late": ("begun", "skipped"),
        "cut off": ("begun",),
        "done later": ("skipped", "begun", "wrong"),
    }.items():
        for status in statuses:
            records.add("targets", key, status, fingerprint="now")
    records.add("targets", "old", "done", fingerprint="before")
    assert records.ended("targets", "now") == {"done", "crashed", "done later"}


def test_the_quickest_size_is_the_one_that_is_right_everywhere():
    def record(value, case, us, status="done"):
        return {"part": "sweep", "status": status, "value": value, "case": case, "us": us}

    names = [*sweep.CASES]
    records = [record(128, name, 10.0) for name in names]
    records += [record(256, name, 30.0 if name == names[0] else 6.0) for name in names]
    records += [record(512, name, 1.0) for name in names[1:]]
    records += [record(1024, name, 1.0, "wrong") for name in names]
    known = {"NVIDIA H200": {"other": {"tile": 64}}}
    assert sweep.tuned(known, "NVIDIA H200", records) == {
        "NVIDIA H200": {"other": {"tile": 64}, "paged_decode": {"split_tokens": 256}}
    }
    assert sweep.tuned(known, "NVIDIA H200", []) == known


def test_tables_are_written_while_there_is_more_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(self_check, "fingerprint", lambda: "now")
    own = {"fingerprint": "now", "part": "smoke", "key": "a"}
    found = [{"part": "machine", "key": "versions", "status": "done", "device": "NVIDIA H200"}]
    h200.write_tables(tmp_path, [])
    assert not (tmp_path / "verified.json").exists()
    h200.write_tables(tmp_path, [*found, own | {"status": "done", "classes": [["merge", "a"]]}])
    written = json.loads((tmp_path / "verified.json").read_text())
    assert written["NVIDIA H200"] == {"now": {"merge": ["a"]}}
    h200.write_tables(tmp_path, [*found, own | {"status": "crashed", "classes": [["merge", "a"]]}])
    written = json.loads((tmp_path / "verified.json").read_text())
    assert written["NVIDIA H200"] == {"now": {}}


def test_classes_are_those_that_operations_ask_about(monkeypatch):
    """And what is refused is not tried."""
    monkeypatch.setattr(backends, "target", lambda: ("gpu", "NVIDIA H200", True))
    monkeypatch.setattr(self_check, "why_not", classes.asked)
    monkeypatch.setattr(self_check.SelfCheck, "run", lambda check: None)
    ((operation, shapes),) = classes.needed(PackedMatmul(FP8, 4, 64, 256).problem())
    assert operation == "quantized_matmul" and shapes.startswith("float8_e4m3fn in rows")
    assert classes.tried(PackedMatmul(FP8, 4, 64, 256)) == {}
    refused = classes.tried(PackedMatmul(FP8, 4, 65, 256))
    assert refused["status"] == "refused" and "65 outputs" in refused["why"]
    monkeypatch.setattr(self_check.SelfCheck, "run", lambda check: "It was wrong.")
    found = classes.tried(PackedMatmul(FP8, 4, 64, 256))
    assert found == {"status": "wrong", "why": "It was wrong."}


CRASHES_ONCE = """
import os, pathlib, sys, time
from device.records import Records
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
records = Records(out / "records.jsonl")
for key in ("first", "second"):
    if key not in [record["key"] for record in records.of("targets")]:
        records.add("targets", key, "begun", fingerprint="now", classes=[["merge", key]])
        if key == "first":
            os._exit(9)
        records.add("targets", key, "done")
"""


def test_a_part_goes_on_after_a_crash(tmp_path, monkeypatch, capsys):
    script = tmp_path / "script.py"
    script.write_text(CRASHES_ONCE)
    monkeypatch.setattr(h200, "__file__", str(script))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "benchmarks"))
    records = Records(tmp_path / "records.jsonl")
    arguments = argparse.Namespace(out=tmp_path, only=(), seed=1, until=time.time() + PATIENCE_S)
    assert h200.supervise("targets", time.time() + PATIENCE_S, arguments, records)
    assert not h200.supervise("targets", time.time() + PATIENCE_S, arguments, records)
    last = {record["key"]: record for record in records.read()}
    assert last["first"]["status"] == "crashed" and "status 9" in last["first"]["why"]
    assert last["first"]["classes"] == [["merge", "first"]]
    assert last["second"]["status"] == "done"
    assert "done: targets: second" in capsys.readouterr().out


def test_a_part_that_cannot_begin_is_not_tried_again(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(2)")
    monkeypatch.setattr(h200, "__file__", str(script))
    records = Records(tmp_path / "records.jsonl")
    arguments = argparse.Namespace(out=tmp_path, only=(), seed=1, until=time.time() + PATIENCE_S)
    assert not h200.supervise("targets", time.time() + PATIENCE_S, arguments, records)
    assert [record["status"] for record in records.read()] == ["crashed"]


def test_what_hangs_is_ended(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(CRASHES_ONCE.replace("os._exit(9)", "time.sleep(100)"))
    monkeypatch.setattr(h200, "__file__", str(script))
    monkeypatch.setattr(h200, "STUCK_S", 3)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "benchmarks"))
    records = Records(tmp_path / "records.jsonl")
    arguments = argparse.Namespace(out=tmp_path, only=(), seed=1, until=time.time() + PATIENCE_S)
    assert h200.supervise("targets", time.time() + PATIENCE_S, arguments, records)
    assert [record["status"] for record in records.read()] == ["begun", "crashed"]
