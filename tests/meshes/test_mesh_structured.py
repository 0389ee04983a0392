"""Output of a given form on many devices and many hosts: what one device says."""

from __future__ import annotations

import json
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from exhaustive import combination
from mesh_engines import load, on_mesh
from patience import PATIENCE_S
from tiny_engines import CONTEXT, Arrival, TinyModel, drive

from jaxserve.core.requests.sampling_params import SamplingParams

pytestmark = pytest.mark.meshes

FREE = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
WORD = {"temperature": 0, "max_tokens": 24, "structured_outputs": {"regex": "[a-f]{5,9}"}}
VALUE = {
    "temperature": 1.2,
    "n": 2,
    "seed": 5,
    "max_tokens": 24,
    "structured_outputs": {"json": {"enum": ["a", "bc", "defg", 12, None, "äö"]}},
}
KINDS = (WORD, FREE, VALUE)


def said(model: TinyModel, mesh: str, **settings: object) -> list[list[tuple[int, ...]]]:
    """Tokens of requests with and without a grammar, a step apart."""
    arrivals = [
        Arrival(prompt, SamplingParams(**KINDS[i % 3]), step=i)
        for i, prompt in enumerate(model.prompts)
    ]
    with load(model, mesh, **settings) as llm:
        outputs = drive(llm.engine, arrivals)
    for arrival, output in zip(arrivals, outputs):
        assert output.error is None
        if arrival.params.structured_outputs is not None:
            assert {c.finish_reason for c in output.outputs} == {"stop"}
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def structured(answered):
    """The directory of the model, with what one device says beside it."""
    on_mesh("", say_alone, answered)
    return answered


def say_alone(mesh: str, directory: Path) -> None:
    with open(directory / "structured.pickle", "wb") as file:
        pickle.dump(said(TinyModel.open(directory / "model"), mesh), file)


def said_alone(directory: Path) -> list[list[tuple[int, ...]]]:
    with open(directory / "structured.pickle", "rb") as file:
        return pickle.load(file)


def check(mesh: str, directory: Path, **settings: object) -> None:
    model = TinyModel.open(directory / "model")
    assert said(model, mesh, **settings) == said_alone(directory)


@pytest.mark.parametrize("mesh", [combination("TP2"), combination("PP4"), "TP2 PP2 CP2"])
def test_a_mesh_says_what_one_device_says(structured, mesh):
    on_mesh(mesh, check, structured)


def test_a_pipeline_whose_pages_are_moved_with_steps_in_flight(structured):
    """Such steps are run to their end before the move, and sampled there."""
    moving = {"preemption": "swap", "host_pages": 64, "max_num_seqs": 4}
    on_mesh("PP2", check, structured, **moving)


HOST = """
import json, sys
import jax
jax.config.update("jax_platforms", "cpu")
host, address, settings = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
from jaxserve.distributed.runtime import join
join(address, 2, host, devices=1, timeout_s=400)
from jaxserve import LLM, SamplingParams
with LLM(**settings) as llm:
    if host:
        llm.engine.follow()
        sys.exit("followed to the end")
    params = [SamplingParams(**fields) for fields in json.loads(sys.argv[4])]
    outputs = llm.generate(json.loads(sys.argv[5]), params, use_tqdm=False)
    print(json.dumps([[c.token_ids for c in output.outputs] for output in outputs]))
"""


def test_two_hosts_say_what_one_says(structured):
    """The second is told of the grammars by the first, and computes the same masks."""
    model = TinyModel.open(structured / "model")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    settings = {
        "model": str(model.path),
        "max_model_len": CONTEXT,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 2 + 16,
        "page_size": 8,
        "tensor_parallel_size": 2,
    }
    given = (settings, [KINDS[i % 3] for i in range(len(model.prompts))], model.prompts)
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", HOST, str(host), address, *map(json.dumps, given)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in range(2)
    ]
    try:
        (answers, error), (_, followed) = [host.communicate(timeout=PATIENCE_S) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert hosts[0].returncode == 0, error[-3000:]
    assert "followed to the end" in followed
    (said_together,) = [line for line in answers.splitlines() if line.startswith("[[[")]
    assert json.loads(said_together) == json.loads(json.dumps(said_alone(structured)))
