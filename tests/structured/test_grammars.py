"""An engine's grammars: compiled once, in turn, in time, and forgotten last used first."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from jaxserve.core.errors import OverloadedError, RequestError
from jaxserve.core.requests.structured_outputs import MAX_GRAMMAR_BYTES, StructuredOutputs
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.structured import grammars as grammars_module
from jaxserve.structured.grammar import Grammar
from jaxserve.structured.grammars import (
    CACHED_BYTES,
    CACHED_GRAMMARS,
    COMPILERS,
    MAX_WAITING,
    Grammars,
)

EOS = (2, 0)
PATIENCE_S = 60
"""A machine may be busy."""


@pytest.fixture
def grammars(llama) -> Grammars:
    return Grammars(open_checkpoint(llama.path).tokenizer(), 256, EOS)


@pytest.fixture
def compiled(monkeypatch):
    """What is compiled, in its order."""
    compiled = []

    class Counted(Grammar):
        def __init__(self, vocabulary, spec):
            compiled.append(spec)
            super().__init__(vocabulary, spec)

    monkeypatch.setattr(grammars_module, "Grammar", Counted)
    return compiled


@pytest.fixture
def let_go(monkeypatch):
    """What the compilation of `slow` ones waits for."""
    let_go = threading.Event()

    class Slow(Grammar):
        def __init__(self, vocabulary, spec):
            if spec.regex.startswith("slow"):
                let_go.wait(PATIENCE_S)
            super().__init__(vocabulary, spec)

    monkeypatch.setattr(grammars_module, "Grammar", Slow)
    yield let_go
    let_go.set()


def regex(text: str) -> StructuredOutputs:
    return StructuredOutputs(regex=text)


def test_concurrent_requests_compile_a_grammar_once(grammars, compiled):
    futures = [grammars.submit(regex("first")) for _ in range(8)]
    assert len({id(future.result(PATIENCE_S)) for future in futures}) == 1
    assert compiled == [regex("first")]
    others = [regex(f"a{{{n}}}") for n in range(1, CACHED_GRAMMARS + 1)]
    for other in others:
        grammars.get(other)
    grammars.get(others[-1])
    assert compiled == [regex("first"), *others]
    grammars.get(regex("first"))
    assert compiled[-1] == regex("first"), "it had to make room"


def test_few_large_ones_are_kept(grammars, compiled):
    size = MAX_GRAMMAR_BYTES // 2
    large = [regex(f"({n:02}" + "a" * (size - 4) + ")") for n in range(CACHED_BYTES // size + 3)]
    for spec in large:
        grammars.get(spec)
    grammars.get(large[3])
    assert compiled == large
    grammars.get(large[0])
    assert compiled == [*large, large[0]], "it had to make room"


def test_a_slow_grammar_is_refused_and_delays_no_other(grammars, let_go, monkeypatch):
    monkeypatch.setattr(grammars_module, "COMPILE_S", 0.05)
    for _ in range(2):
        with pytest.raises(RequestError, match=r"regex was not compiled in time .at most 0.05 s"):
            grammars.submit(regex("slow")).result(PATIENCE_S)
    monkeypatch.setattr(grammars_module, "COMPILE_S", PATIENCE_S)
    assert grammars.submit(regex("quick")).result(PATIENCE_S)
    let_go.set()
    assert grammars.get(regex("slow"))
    assert grammars.submit(regex("slow")).result(0), "it is there for who asks again"


def test_the_time_that_one_waits_for_its_turn_is_not_its_own(grammars, let_go, monkeypatch):
    slow = [grammars.submit(regex(f"slow{n}")) for n in range(COMPILERS)]
    monkeypatch.setattr(grammars_module, "COMPILE_S", 5.0)
    monkeypatch.setattr(grammars_module, "WAIT_S", 0.05)
    late = grammars.submit(regex("late"))
    with pytest.raises(OverloadedError, match=r"regex has waited 0.05 s"):
        late.result(PATIENCE_S)
    let_go.set()
    assert all(future.result(PATIENCE_S) for future in slow)
    assert grammars.get(regex("late"))


def test_too_many_that_wait_are_refused_and_those_known_are_not(grammars, let_go):
    for number in range(COMPILERS):
        grammars.submit(regex(f"slow{number}"))
    give_up = time.monotonic() + PATIENCE_S
    while grammars._waiting and time.monotonic() < give_up:
        time.sleep(0.001)  # Until both have begun.
    waiting = [grammars.submit(regex(f"w{number}")) for number in range(MAX_WAITING)]
    with pytest.raises(OverloadedError, match=f"{MAX_WAITING} grammars wait"):
        grammars.submit(regex("more"))
    again = grammars.submit(regex("w3"))
    assert waiting[3].cancel(), "which is its own affair"
    let_go.set()
    assert again.result(PATIENCE_S)
    assert grammars.submit(regex("more")).result(PATIENCE_S)


def test_each_caller_has_an_error_of_his_own(grammars):
    errors = [grammars.submit(regex("a(")).exception(PATIENCE_S) for _ in range(2)]
    assert str(errors[0]) == str(errors[1])
    assert errors[0] is not errors[1]


def test_no_thread_stays_when_nothing_is_left_to_compile(grammars):
    assert grammars.get(regex("a"))
    give_up = time.monotonic() + PATIENCE_S
    while _compilers() and time.monotonic() < give_up:
        time.sleep(0.001)
    assert not _compilers()


def _compilers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "jaxserve-grammar"]


def test_a_compilation_does_not_hold_up_the_end_of_the_process(llama):
    program = f"""
import threading
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.structured import grammars
from jaxserve.core.requests.structured_outputs import StructuredOutputs
begun = threading.Event()
def endless(vocabulary, spec):
    begun.set()
    threading.Event().wait()
grammars.Grammar = endless
tokenizer = open_checkpoint({str(llama.path)!r}).tokenizer()
grammars.Grammars(tokenizer, 256, [2]).submit(StructuredOutputs(regex="a"))
assert begun.wait({PATIENCE_S})
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_S)
