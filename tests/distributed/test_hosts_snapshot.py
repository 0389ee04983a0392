"""Snapshots of an engine on several hosts: real processes, restored on another number of them."""

from __future__ import annotations

import json
import os
import re

import pytest
from test_hosts import MAX_TOKENS, PROMPTS, Job

pytestmark = pytest.mark.meshes

LONGEST_FIRST = PROMPTS[::-1]
"""Of TinyModel.prompts."""

SCRIPT = """
import json, os, signal, sys
import jax
jax.config.update("jax_platforms", "cpu")
settings = json.loads(sys.argv[1])
host, hosts, address = settings.pop("host"), settings.pop("hosts"), settings.pop("address")
prompts, role = settings.pop("prompts"), settings.pop("role")
max_tokens, work = settings.pop("max_tokens"), settings.pop("work")
from jaxserve.distributed.runtime import join
join(address, hosts, host, devices=settings.pop("devices"), timeout_s=400)
from jaxserve import LLM, SamplingParams, resumable
from jaxserve.core.errors import SnapshotError

def tokens(streams):
    print(json.dumps([list(stream.result().outputs[0].token_ids) for stream in streams]))

with LLM(**settings) as llm:
    if role == "follows":
        llm.engine.follow()
        sys.exit("followed to the end")
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    if role.startswith("is told to stop"):
        with resumable(llm, work + "/stopped"):
            if role.endswith("sooner"):
                os.kill(os.getpid(), signal.SIGTERM)
            streams = [llm.stream({"prompt_token_ids": prompt}, greedy) for prompt in prompts]
            for _ in range(10):
                llm.engine.step()
            os.kill(os.getpid(), signal.SIGTERM)
    try:
        llm.restore(work + "/nothing")
    except SnapshotError as error:
        print("refused:", error)
    if role == "restores":
        streams = llm.restore(work + "/begun")
        llm.engine.step()
        llm.snapshot(work + "/again")
        tokens(streams)
        print("computed", llm.get_metrics()["jaxserve:prefill_tokens_total"].value)
    else:
        streams = [llm.stream({"prompt_token_ids": prompt}, greedy) for prompt in prompts]
        for _ in range(10 if role == "writes" else 7):  # The other host waits for host 0.
            llm.engine.step()
        llm.snapshot(work + "/begun")
        llm.snapshot(work + "/late", deadline_s=0)
        llm.engine.step()
        for refused in (
            lambda: llm.snapshot(work),  # where other files are
            lambda: llm.export_request(streams[0].request_id),
        ):
            try:
                refused()
            except SnapshotError as error:
                print("refused:", error)
        tokens(streams)
"""


def ran(llama, work, roles, **settings):
    """What each host printed, and host 0 generated."""
    prompts = [llama.prompts[index] for index in LONGEST_FIRST]
    settings |= {"script": SCRIPT, "work": str(work), "prompts": prompts}
    with Job(llama, roles, **settings) as job:
        ended = job.ends()
    for role, (_, stderr, status) in zip(roles, ended):
        followed = role == "follows" and "followed to the end" in stderr
        assert followed or status == 0, stderr[-3000:]
    said = [stdout for stdout, _, _ in ended]
    return said, json.loads(re.search(r"^\[\[.*$", said[0], re.MULTILINE)[0])


def test_a_host_that_is_told_to_stop_before_its_first_call_joins_in_the_snapshot(llama, tmp_path):
    roles = ("is told to stop", "is told to stop sooner")
    prompts = [llama.prompts[index] for index in LONGEST_FIRST]
    settings = {"script": SCRIPT, "work": str(tmp_path), "prompts": prompts}
    with Job(llama, roles, tensor_parallel_size=2, **settings) as job:
        for _, stderr, status in job.ends():
            assert status == os.EX_TEMPFAIL, stderr[-3000:]
    tokens, num_computed = restored(llama, tmp_path / "stopped")
    assert tokens == [llama.answer(index, MAX_TOKENS, ignore_eos=True) for index in LONGEST_FIRST]
    assert num_computed < sum(map(len, prompts)) / 2


def restored(model, directory):
    """What one process with one device generates of a snapshot, and how many prompt tokens it
    computes."""
    with model.load() as llm:
        streams = llm.restore(directory)
        tokens = [list(stream.result().outputs[0].token_ids) for stream in streams]
        return tokens, llm.get_metrics()["jaxserve:prefill_tokens_total"].value


def test_a_snapshot_goes_from_hosts_to_one_process_and_to_others(llama, tmp_path):
    expected = [llama.answer(index, MAX_TOKENS, ignore_eos=True) for index in LONGEST_FIRST]
    total = sum(len(llama.prompts[index]) for index in LONGEST_FIRST)
    roles = ("writes", "is there sooner")
    said, tokens = ran(llama, tmp_path, roles, tensor_parallel_size=2)
    assert tokens == expected
    assert all("refused: there is no complete snapshot" in each for each in said)
    assert all("refused: requests move one by one between engines of" in each for each in said)
    assert f"refused: {tmp_path} holds 'begun'" in said[0]
    assert f"refused: on host 0: {tmp_path} holds 'begun'" in said[1]
    # One process with another page size computes what was not yet computed.
    of_begun = restored(llama, tmp_path / "begun")
    of_late = restored(llama, tmp_path / "late")
    assert of_begun[0] == of_late[0] == expected
    assert of_begun[1] < total / 2 < of_late[1]
    # Two hosts, each with two devices, one of which follows.
    sizes = {"devices": 2, "pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    said, tokens = ran(llama, tmp_path, ("restores", "follows"), **sizes)
    assert tokens == expected
    assert float(re.search("computed (.*)", said[0])[1]) < total / 2
    of_again = restored(llama, tmp_path / "again")
    assert of_again[0] == expected and of_again[1] < total / 2
