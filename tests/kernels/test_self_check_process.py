"""Self-checks in a process of their own, by real processes on this CPU."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from patience import PATIENCE_S

from pallas_kernels import self_check, self_check_process
from pallas_kernels.paged_attention import KVPages, RaggedBatch, Visible, check_case, xla
from pallas_kernels.paged_attention.gpu.decode import MAX_SPLITS
from pallas_kernels.paged_attention.gpu.decode_work import TILE, Cutting, worker_of


def double(x):
    return 2 * x


def also_double(x):
    return x + x


def triple(x):
    return 3 * x


def aborts(x):
    print("this is no answer", flush=True)
    os.write(2, b"TMA descriptor: no such box\n")
    os.abort()


def hangs(x):
    time.sleep(1000)


def case(arguments, options, rng):
    return self_check.CheckCase((self_check.random_like(rng, (3,), arguments[0].dtype),), {}, 1e-6)


def check(kernel):
    shapes = (jax.ShapeDtypeStruct((100,), jnp.float32),)
    return self_check.SelfCheck("cpu", kernel, double, case, shapes, {})


@pytest.fixture(scope="module", autouse=True)
def one_process():
    sys.path.insert(0, os.path.dirname(__file__))  # for the other process to find these functions
    yield
    self_check.finish()
    sys.path.remove(os.path.dirname(__file__))


def test_a_crash_costs_one_check():
    """One process serves what follows; after it was lost there is another."""
    assert self_check_process.run(check(also_double)) is None
    first = self_check_process._process.pid
    assert "was wrong by" in self_check_process.run(check(triple))
    assert self_check_process._process.pid == first
    why = self_check_process.run(check(aborts))
    assert why == "its self-check ended its process by SIGABRT: TMA descriptor: no such box"
    assert self_check_process.run(check(also_double)) is None
    assert self_check_process._process.pid != first


def test_what_hangs_is_killed(monkeypatch):
    self_check_process.run(check(also_double))
    hanging = self_check_process._process.pid
    monkeypatch.setattr(self_check_process, "TIMEOUT_S", 0.5)
    assert "did not end within 0.5 s, and was killed" in self_check_process.run(check(hangs))
    with pytest.raises(ProcessLookupError):
        os.kill(hanging, signal.SIGCONT)


@pytest.mark.parametrize("seen", [True, False])
def test_a_crash_between_checks_costs_none_or_one(monkeypatch, seen):
    """`seen`: whether it is known to have ended before a check is sent."""
    self_check_process.run(check(also_double))
    process = self_check_process._process
    process.kill()
    process.wait()
    if not seen:
        monkeypatch.setattr(process, "poll", lambda: None)
        assert "ended its process by SIGKILL" in self_check_process.run(check(also_double))
    assert self_check_process.run(check(also_double)) is None


def test_an_interrupted_check_answers_no_other(monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(self_check_process.select, "select", interrupted)
        self_check_process.run(check(triple))
    assert self_check_process.run(check(also_double)) is None


def test_what_hangs_outlives_this_process_for_a_while_only(monkeypatch):
    self_check.finish()
    monkeypatch.setattr(self_check_process, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(self_check_process, "_GRACE_S", 0.0)
    process = self_check_process._started()
    process.stdin.write(pickle.dumps(check(hangs)))
    process.stdin.close()  # As if this process had been killed.
    assert process.wait(timeout=PATIENCE_S) == -signal.SIGALRM
    self_check.finish()


def test_checks_of_attention_can_be_sent(monkeypatch):
    """Whatever they were asked for with: tracers, and trees of them."""
    sent = []
    monkeypatch.setattr(self_check_process, "run", sent.append)
    monkeypatch.setattr(self_check, "_tried", {})

    def traced(q, pages, batch, visible):
        arguments = q, KVPages(*pages), RaggedBatch(*batch), Visible(*visible)
        options = {"num_decodes": 1, "scale": 0.1, "soft_cap": None}
        asked = self_check.SelfCheck(
            "gpu",
            xla.paged_attention,
            xla.paged_attention,
            check_case.check_case,
            arguments,
            options,
        )
        self_check.why_not("paged_attention", "a GPU", "a class", asked)
        return q

    k, v = jnp.zeros((2, 1, 64, 16)), jnp.zeros((2, 1, 16, 64))
    row = jnp.zeros(1, jnp.int32)
    jax.eval_shape(traced, jnp.zeros((1, 2, 64)), (k, v), (row[:, None], row, row, row), (row, row))
    monkeypatch.undo()
    assert self_check_process.run(sent[0]._replace(platform="cpu")) is None


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (32, 8), (64, 8), (40, 40), (16, 1)])
def test_the_self_check_of_decodes_reaches_what_breaks(heads, kv_heads):
    """Rows of one split, of a few and of as many as there can be; and on few multiprocessors each
    stream takes several units, of more tiles than its ring holds."""
    shapes = (
        jax.ShapeDtypeStruct((4, heads, 64), jnp.bfloat16),
        KVPages(*(jax.ShapeDtypeStruct((9, kv_heads, 64, 64), jnp.bfloat16),) * 2),
    )
    options = {"num_decodes": 4, "scale": 1.0, "soft_cap": None}
    found = check_case.check_case(shapes, options, np.random.default_rng(0))
    _, _, batch, (since, until) = found.arguments
    assert found.options["num_decodes"] == len(batch.tables) == len(until)
    cutting = Cutting.of(batch.tables.shape[1] * 64, 512, max(1, MAX_SPLITS // kv_heads))
    cut = cutting.cut(jnp.asarray(since), jnp.asarray(until))
    assert {0, 1, 2, 3, cutting.splits} <= {*cut.splits.tolist()}
    assert cutting.splits in (6, 32)
    units = int(cut.splits.sum()) * kv_heads
    assert units >= 5 * 2 * self_check.FEW_SMS
    assert (cut.size >= 8).all(), f"splits of {TILE * 8} tokens, where a ring has at most 4 tiles"


def test_few_units_go_to_as_many_multiprocessors():
    workers = {
        (block, stream): worker_of(block, stream, 132) for block in range(132) for stream in (0, 1)
    }
    assert sorted(workers.values()) == list(range(264))
    assert {block for (block, _), worker in workers.items() if worker < 132} == set(range(132))
