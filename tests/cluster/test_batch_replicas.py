"""Batch jobs over replicas of this process, which are lost while it runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
from batch_files import answers, errors, prompts, write_lines
from mortal import Mortal

from jaxserve.cluster.router import Router
from jaxserve.core.errors import BatchError, EngineClosedError
from jaxserve.core.process.signals import signals_handled
from jaxserve.core.settings.config import EngineConfig
from jaxserve.offline import run_batch
from jaxserve.offline.job import BatchJob, settings_of
from jaxserve.offline.reports.report import report
from jaxserve.offline.run import BatchRun
from jaxserve.offline.workers import ReplicasWorker, check_answers

SEVERAL = {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 5, "temperature": 1}
REFUSED = {"prompt": ["a", "b"], "structured_outputs": {"regex": "("}}
LINES = [*prompts(24), SEVERAL, REFUSED, json.dumps({"prompt": ""})]


@pytest.fixture(scope="module")
def expected(llm_for, tmp_path_factory) -> dict:
    """The answers of one engine."""
    directory = tmp_path_factory.mktemp("one")
    run_batch(llm_for(), write_lines(directory / "in.jsonl", LINES), directory / "out.jsonl")
    return answers(directory / "out.jsonl")


def run(router: Router, directory: Path, progress=lambda run: None) -> BatchRun:
    lines = directory / "in.jsonl"
    if not lines.exists():
        write_lines(lines, LINES)
    info = router.info
    used = settings_of(info.config, info.fingerprint, router.get_tokenizer())
    with (
        BatchJob(lines, directory / "out.jsonl", used) as job,
        ReplicasWorker(router) as worker,
    ):
        run = BatchRun(job)
        run.run(worker, progress=progress)
        return run


def test_answers_are_those_of_one_engine(cluster, expected, tmp_path):
    router, _ = cluster
    finished = run(router, tmp_path)
    assert finished.complete and not finished._lines and not finished._running
    found = answers(tmp_path / "out.jsonl")
    refusals = {len(LINES) - 1: "invalid_value", len(LINES): "invalid_value"}
    assert errors(tmp_path / "out.jsonl") == refusals
    assert found == expected
    assert [each.index for each in finished.replicas] == [0, 1]
    assert sum(each.num_finished for each in finished.replicas) >= 24 + 3
    assert all(each.num_finished for each in finished.replicas)
    assert "Replicas of this run" in report(finished)


def replicas_lost(router: Router) -> int:
    return sum(each.num_losses for each in asyncio.run(router.cluster_status()).replicas)


@pytest.mark.parametrize("ends_after", [1, 14])
def test_a_lost_replica_costs_no_line(cluster, expected, tmp_path, ends_after):
    router, replicas = cluster
    losses = replicas_lost(router)
    replicas[ends_after % 2].ends_after = ends_after
    before = {}

    def progress(run: BatchRun) -> None:
        before.setdefault("text", (tmp_path / "out.jsonl").read_bytes())

    finished = run(router, tmp_path, progress)
    assert finished.complete
    assert replicas_lost(router) == losses + 1
    assert answers(tmp_path / "out.jsonl") == expected
    assert (tmp_path / "out.jsonl").read_bytes().startswith(before["text"])


def test_a_line_that_ends_each_replica_has_an_error(cluster, expected, tmp_path):
    router, replicas = cluster
    for replica in replicas:
        replica.ends_with = "7."
    finished = run(router, tmp_path)
    for replica in replicas:
        replica.ends_with = ""
    assert finished.complete
    found = answers(tmp_path / "out.jsonl")
    assert found[7]["error"]["code"] == "unavailable"
    assert "was given up after 3 replicas were lost with it" in found[7]["error"]["message"]
    del found[7]
    assert found == {number: each for number, each in expected.items() if number != 7}


def test_a_stopped_job_goes_on_where_it_was(cluster, expected, tmp_path):
    """Its requests have left the replicas, which the next part of the job takes."""

    class Stopped(Exception):
        pass

    def stop(run: BatchRun) -> None:
        if run.done > 5:
            raise Stopped

    router, _ = cluster
    with pytest.raises(Stopped):
        run(router, tmp_path, stop)
    done = answers(tmp_path / "out.jsonl")
    assert 5 < len(done) < len(LINES)
    finished = run(router, tmp_path)
    assert finished.done == len(LINES) - len(done)
    assert answers(tmp_path / "out.jsonl") == expected


def test_without_a_replica_the_job_ends_and_can_be_resumed(llama, cluster, expected, tmp_path):
    replica = Mortal()
    router = Router(lambda: [replica], EngineConfig.of(model=llama.path, **llama.settings()))
    replica.ends_after, replica.loads = 40, ["failed"] * 10
    with pytest.raises(EngineClosedError, match="no replica is left: the device has no memory"):
        run(router, tmp_path)
    router.close()
    assert len(answers(tmp_path / "out.jsonl")) < len(LINES)
    finished = run(cluster[0], tmp_path)
    assert finished.complete
    assert answers(tmp_path / "out.jsonl") == expected


def test_replicas_of_another_model_or_dtype_are_refused(cluster):
    """As those of machines with other files, or other devices."""
    router, _ = cluster
    info = router.info
    used = settings_of(info.config, info.fingerprint, router.get_tokenizer())
    check_answers(router, used)
    with pytest.raises(BatchError, match="copy the same files to every machine"):
        check_answers(router, used | {"model": "another"})
    with pytest.raises(BatchError, match=r"add --dtype bfloat16, or --dtype float32 and give"):
        check_answers(router, used | {"dtype": "bfloat16"})


def test_an_interrupt_while_replicas_load_ends_them(llama):
    ended = []

    class Interrupted(BaseException):
        pass

    class Slow(Mortal):
        async def load(self, *arguments):
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.Event().wait()

        async def close(self):
            ended.append("replica")

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    config = EngineConfig.of(model=llama.path, **llama.settings())
    with signals_handled(interrupt, signal.SIGUSR1), pytest.raises(Interrupted):
        Router(lambda: [Slow(), Slow()], config, on_end=lambda: ended.append("all"))
    assert ended == ["replica", "replica", "all"]
