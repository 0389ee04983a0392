"""Grammars behind an event loop: one that compiles does not delay other requests."""

from __future__ import annotations

import asyncio
import threading

import pytest
from patience import PATIENCE_S
from tiny_engines import assert_idle

from jaxserve.async_engine import AsyncEngine
from jaxserve.core.errors import RequestError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.structured import grammars as grammars_module
from jaxserve.structured.grammar import Grammar

FREE = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SLOW = SamplingParams(temperature=0, structured_outputs={"choice": ["slow"]})


@pytest.fixture(scope="module")
def served(llama):
    """An engine and its event loop's end of it."""
    engine = llama.load().engine
    served = AsyncEngine(engine)
    yield served, engine
    served.close()


@pytest.fixture
def let_go(monkeypatch):
    """What the compilation of SLOW waits for."""
    let_go = threading.Event()

    class Slow(Grammar):
        def __init__(self, vocabulary, spec):
            if spec == SLOW.structured_outputs:
                let_go.wait(PATIENCE_S)
            super().__init__(vocabulary, spec)

    monkeypatch.setattr(grammars_module, "Grammar", Slow)
    monkeypatch.setattr(grammars_module, "COMPILE_S", PATIENCE_S)  # A machine may be busy.
    yield let_go
    let_go.set()


def prompt(llama):
    return {"prompt_token_ids": llama.prompts[3]}


def test_others_are_served_while_a_grammar_compiles(llama, served, let_go):
    engine, _ = served

    async def scenario():
        slow = asyncio.create_task(engine.generate(prompt(llama), SLOW))
        gone = asyncio.create_task(engine.generate(prompt(llama), SLOW, "given up"))
        free = await asyncio.wait_for(engine.generate(prompt(llama), FREE), PATIENCE_S)
        assert list(free.outputs[0].token_ids) == llama.answers[3][:8]
        assert not slow.done()
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        let_go.set()
        output = await asyncio.wait_for(slow, PATIENCE_S)
        assert output.outputs[0].text == "slow"
        assert output.outputs[0].finish_reason == "stop"

    asyncio.run(scenario())
    assert_idle(served[1])


def test_a_bad_grammar_is_refused_to_its_own_caller(llama, served):
    engine, _ = served
    bad = SamplingParams(structured_outputs={"json": {"type": "objekt"}})

    async def scenario():
        calls = [engine.generate(prompt(llama), params) for params in (bad, FREE)]
        refused, fine = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(refused, RequestError)
        assert "structured_outputs.json" in str(refused)
        assert list(fine.outputs[0].token_ids) == llama.answers[3][:8]

    asyncio.run(scenario())
    assert_idle(served[1])
