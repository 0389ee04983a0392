"""Requests that begin on one mesh and end on another: each leg is a process that is killed."""

from __future__ import annotations

import os
import pickle
import signal
from concurrent.futures import BrokenExecutor
from pathlib import Path

import pytest
from exhaustive import combination
from mesh_engines import load, on_mesh
from mesh_workload import GREEDY
from tiny_engines import LONGEST, PROMPT_LENGTHS, TinyModel

from jaxserve.core.events import Dispatched
from jaxserve.engine.engine import Engine

pytestmark = pytest.mark.meshes

STEPS = 5
PAGES = 40
SETTINGS = {"TP4": {"page_size": 16}, "TP4 PP2": {"max_num_seqs": 3}}
PROMPTS = [PROMPT_LENGTHS.index(length) for length in (17, 33, 100)]


@pytest.mark.parametrize(
    ("way", "with_kv"),
    [
        (("TP2", "TP4", ""), True),
        combination(("", "PP2", "CP2"), True),
        combination(("", "PP2", "CP2"), False),
        combination(("CP4", "TP4 PP2", "PP2"), True),
    ],
)
def test_a_move_in_the_midst_of_generation(answered, tmp_path, way, with_kv):
    first, *others = way
    begin_and_die(first, answered, tmp_path / "0", with_kv)
    for number, mesh in enumerate(others):
        last = number == len(others) - 1
        arguments = answered, tmp_path / str(number), tmp_path / str(number + 1), with_kv
        on_mesh(mesh, end if last else go_on, *arguments, **SETTINGS.get(mesh, {}))


def begin_and_die(mesh: str, answered: Path, target: Path, with_kv: bool) -> None:
    with pytest.raises(BrokenExecutor):  # It is not given the time to exit.
        on_mesh(mesh, begin, answered, target, with_kv, **SETTINGS.get(mesh, {}))
    assert (target / "manifest.json").is_file()


def begin(mesh: str, answered: Path, target: Path, with_kv: bool, **settings: object) -> None:
    model = TinyModel.open(answered / "model")
    llm = load(model, mesh, pages=PAGES, **settings)
    for index in PROMPTS:
        llm.engine.add(f"prompt {index}", model.prompts[index], GREEDY)
    for _ in range(STEPS):
        llm.engine.step()
    llm.snapshot(target, with_kv)
    os.kill(os.getpid(), signal.SIGKILL)


def go_on(
    mesh: str, answered: Path, source: Path, target: Path, with_kv: bool, **settings: object
) -> None:
    model = TinyModel.open(answered / "model")
    with load(model, mesh, pages=PAGES, trace_file=target.with_suffix(".json"), **settings) as llm:
        streams = llm.restore(source)
        for _ in range(STEPS):
            llm.engine.step()
        llm.snapshot(target, with_kv)
        assert len(streams) == len(PROMPTS)


def end(
    mesh: str, answered: Path, source: Path, target: Path, with_kv: bool, **settings: object
) -> None:
    model = TinyModel.open(answered / "model")
    with open(answered / "answers.pickle", "rb") as file:
        answers, _ = pickle.load(file)
    with load(model, mesh, pages=PAGES, trace_file=target.with_suffix(".json"), **settings) as llm:
        streams = llm.restore(source)
        known = sum(g.seq.num_tokens for stream in streams for g in stream.request.sequence_outputs)
        waiting = [
            s.request for s in streams if not s.request.sequence_outputs[0].seq.output_token_ids
        ]
        for index, stream in zip(PROMPTS, streams, strict=True):
            output = stream.result()
            assert output.request_id == f"prompt {index}"
            assert list(output.outputs[0].token_ids) == answers[index][:LONGEST]
        computed = prefilled(llm.engine)
        if with_kv:  # A token each; and what had not begun, or was cut off in a last page.
            fresh = sum(len(request.prompt_token_ids) for request in waiting)
            assert computed <= fresh + len(streams) * llm.plan().config.page_size // 8
        else:
            assert computed == known


def prefilled(engine: Engine) -> int:
    steps = [record for record in engine.log.records if isinstance(record, Dispatched)]
    return sum(step.prefill_tokens for step in steps)
