"""One engine on several hosts: real processes, with gloo between them on this machine."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from exhaustive import combination
from patience import PATIENCE_S
from tiny_engines import CONTEXT, TinyModel

from jaxserve.models.drafters import eagle
from jaxserve.models.loading.drafters.eagle import save_layer

pytestmark = pytest.mark.meshes

PROMPTS = (0, 3, 6, 9, 11)
"""Of TinyModel.prompts."""
MAX_TOKENS = 12
BOUND_S = PATIENCE_S
"""Until a host that lost another must have ended; an unloaded machine takes some 20 s."""

SCRIPT = """
import json, os, sys, time
import jax
jax.config.update("jax_platforms", "cpu")
settings = json.loads(sys.argv[1])
host, hosts, address = settings.pop("host"), settings.pop("hosts"), settings.pop("address")
prompts, role = settings.pop("prompts"), settings.pop("role")
max_tokens = settings.pop("max_tokens")
from jaxserve.distributed.runtime import join
join(address, hosts, host, devices=settings.pop("devices"), timeout_s=400)
from jaxserve import LLM, SamplingParams

def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]

with LLM(**settings) as llm:
    print("ready", flush=True)
    if role == "follows":
        llm.engine.follow()
        left = llm.get_metrics()["vllm:num_requests_running"].value
        sys.exit("left too early" if left else "followed to the end")
    if role == "is slow":
        step = llm.engine.step
        llm.engine.step = lambda: time.sleep(0.05) or step()
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    print(json.dumps(tokens(llm.generate(prompts, greedy, use_tqdm=False))), flush=True)
    sampled = SamplingParams(temperature=1, n=2, max_tokens=5, ignore_eos=True)
    print(json.dumps(tokens(llm.generate(prompts, sampled, use_tqdm=False))), flush=True)
    counts, name = llm.get_metrics(), "vllm:spec_decode_num_{}_tokens_total"
    drafted, accepted = (int(counts[name.format(kind)].value) for kind in ("draft", "accepted"))
    print(f"drafted {drafted} accepted {accepted}", flush=True)
    if role == "lingers":
        time.sleep(20)
    while role == "goes on":
        llm.generate(prompts, greedy, use_tqdm=False)
"""


class Job:
    """Hosts of one engine of the tiny Llama, each with as many devices."""

    def __init__(self, model, roles, devices=1, changes=(), script=SCRIPT, **settings):
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
        whole = {
            "model": str(model.path),
            "max_model_len": CONTEXT,
            "max_num_seqs": 2,
            "max_num_batched_tokens": 2 + 16,
            "page_size": 8,
            "max_tokens": MAX_TOKENS,
            "prompts": [model.prompts[index] for index in PROMPTS],
            "hosts": len(roles),
            "devices": devices,
            "address": address,
        } | settings
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", script, json.dumps(whole | own)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for host, role in enumerate(roles)
            for own in [{"host": host, "role": role} | dict(changes).get(host, {})]
        ]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()
            process.communicate()

    def ends(self):
        """Each host's stdout and stderr, and its status."""
        said = [process.communicate(timeout=PATIENCE_S) for process in self.processes]
        return [(*texts, process.returncode) for texts, process in zip(said, self.processes)]


def answers(stdout):
    """What a host printed after it was ready."""
    return [json.loads(line) for line in stdout.splitlines() if line.startswith("[[")]


def speculation(method: str, model: TinyModel, directory: Path) -> dict[str, Any]:
    """Settings of an engine with drafts. By "eagle", whose layer is random, each step has as many
    as host 0 finds best."""
    drafts = {"method": method, "num_speculative_tokens": 3}
    if method == "ngram":
        drafts["prompt_lookup_min"] = 1
    elif method == "layer_skip":
        drafts["num_layers"] = model.config.num_layers
    elif method == "draft_model":
        drafts["model"] = str(model.path)
    else:
        config, rng = eagle.layer_for(model.config), np.random.default_rng(6)
        specs = eagle.param_specs(config, biased=True)
        layer = jax.tree.map(lambda spec: np.float32(rng.normal(0, 0.2, spec.shape)), specs)
        save_layer(directory, config, layer)
        drafts |= {"model": str(directory), "num_speculative_tokens": "auto"}
    budget = 2 * (8 if method == "eagle" else 4) + 16
    return {"speculative_config": drafts, "max_num_batched_tokens": budget}


TP2 = {"tensor_parallel_size": 2}
TP2_PP2 = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
CP4 = {"devices": 2, "context_parallel_size": 4}
CP2_PP2 = {"devices": 2, "context_parallel_size": 2, "pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    "roles, settings, method",
    [
        combination(("leads", "follows"), TP2, "eagle"),
        (("leads", "follows"), TP2, "layer_skip"),
        combination(("leads", "does the same", "is slow", "follows"), TP2_PP2, None),
        combination(("leads", "follows", "is slow", "does the same"), TP2_PP2, "ngram"),
        combination(("leads", "is slow"), CP2_PP2, None),
        combination(("leads", "is slow"), CP4, "draft_model"),
    ],
)
def test_the_tokens_of_one_process(llama, tmp_path, roles, settings, method):
    """Without drafts and with them."""
    if method is not None:
        settings = settings | speculation(method, llama, tmp_path)
    with Job(llama, roles, **settings) as job:
        ended = job.ends()
    expected = [llama.answer(index, MAX_TOKENS, ignore_eos=True) for index in PROMPTS]
    sampled = answers(ended[0][0])[1]
    for role, (stdout, stderr, status) in zip(roles, ended):
        if role == "follows":
            assert "followed to the end" in stderr, stderr[-3000:]
        else:
            assert status == 0, stderr[-3000:]
            assert answers(stdout) == [expected, sampled]
            assert ("drafted 0" in stdout) == (method is None)


@pytest.mark.parametrize(
    "victim, hosts, how",
    [
        (1, 2, signal.SIGKILL),
        (0, 2, signal.SIGKILL),
        combination(0, 4, signal.SIGKILL),
        combination(3, 4, signal.SIGKILL),
        (1, 2, signal.SIGSTOP),
        combination(0, 2, signal.SIGSTOP),
    ],
)
def test_a_host_that_is_lost(llama: TinyModel, victim, hosts, how):
    """Killed or frozen, without a launcher: the others end, name it, and print their stacks."""
    with Job(llama, ("goes on",) * hosts, tensor_parallel_size=hosts) as job:
        for process in job.processes:
            while not process.stdout.readline().startswith("[["):
                assert process.poll() is None, process.stderr.read()[-3000:]
        job.processes[victim].send_signal(how)
        deadline = time.monotonic() + BOUND_S
        for host, process in enumerate(job.processes):
            if host == victim:
                continue
            _, stderr = process.communicate(timeout=max(1, deadline - time.monotonic()))
            assert process.returncode != 0
            if victim == 0:  # JAX itself ends those who lost host 0, which keeps its service.
                assert "JAX distributed service detected fatal errors" in stderr, stderr[-3000:]
            else:
                assert f"host {victim} was lost" in stderr, stderr[-3000:]
                assert "most recent call" in stderr  # of the step's error, or of every thread


def test_a_host_may_be_done_sooner(llama):
    """No host waits for it any more."""
    with Job(llama, ("leads", "lingers"), tensor_parallel_size=2) as job:
        for stdout, stderr, status in job.ends():
            assert status == 0 and len(answers(stdout)) == 2, stderr[-3000:]


@pytest.mark.parametrize(
    "own, message",
    [
        ({"max_num_seqs": 3}, r"max_num_seqs is (2 on host 0 and 3|3 on host 1 and 2) on host"),
        ({"page_size": 7}, r"page_size is (8 on host 0 and 7|7 on host 1 and 8) on host"),
    ],
)
def test_hosts_that_are_not_alike(llama, own, message):
    with Job(llama, ("leads", "follows"), tensor_parallel_size=2, changes={1: own}) as job:
        for _, stderr, status in job.ends():
            assert status != 0
            assert re.search(message, stderr), stderr[-3000:]


def test_other_weights(llama, tmp_path):
    other = TinyModel.write_member(tmp_path, "qwen2")
    changes = {1: {"model": str(other.path)}}
    with Job(llama, ("leads", "follows"), tensor_parallel_size=2, changes=changes) as job:
        for _, stderr, status in job.ends():
            assert status != 0 and "digest of the weights is" in stderr, stderr[-3000:]
