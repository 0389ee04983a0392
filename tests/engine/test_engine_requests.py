"""A request's life at the engine: refused, aborted, interrupted, and the engine's own end."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from exhaustive import EXHAUSTIVE
from patience import PATIENCE_S
from scripts import run_script
from tiny_engines import CONTEXT, LONGEST, Arrival, assert_idle, drive

from jaxserve.core.errors import (
    EngineClosedError,
    ModelError,
    PromptTooLongError,
    RequestError,
    UnsupportedModelError,
    WeightsError,
)
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.llm import LLM

GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)


@pytest.fixture
def engine(llm):
    return llm.engine


def state(engine):
    """All that a refusal could have half changed."""
    scheduler = engine.scheduler
    return (
        engine.kv.pool.num_used,
        [seq.seq_id for seq in scheduler.waiting],
        [(seq.seq_id, seq.slot) for seq in scheduler.running],
        {seq_id: list(table.pages) for seq_id, table in scheduler.tables.items()},
        engine.get_metrics()["vllm:num_requests_waiting"].value,
        engine.get_metrics()["vllm:num_requests_running"].value,
    )


# Refusals

REFUSED = {
    "an empty prompt": ([], {}, "at least one"),
    "a prompt as long as the context": ([3] * CONTEXT, {}, rf"{CONTEXT} tokens.*{CONTEXT - 1}"),
    "a token id beyond the vocabulary": ([1, 256], {}, r"256 is out of vocabulary.* in 0\.\.255"),
    "a negative token id": ([1, -1], {}, r"-1 is out of vocabulary.* in 0\.\.255"),
    "a token id that is no integer": ([1, 2.5], {}, r"2\.5 is out of vocabulary: it is not"),
    "no prompt": (None, {}, "None"),
    "a prompt that is a number": (17, {}, "17"),
    "bytes": (b"abc", {}, "decode it"),
    "a truth value for a token": ([1, True], {}, "True is out of vocabulary: it is not an integer"),
    "a dict with another key": ({"text": "hi"}, {}, "prompt_token_ids"),
    "text that is not Unicode": ("\ud800", {}, "Unicode"),
    "a stop token beyond the vocabulary": ([1], {"stop_token_ids": (999,)}, "stop_token_ids.*999"),
    "a bias beyond the vocabulary": ([1], {"logit_bias": {256: 1.0}}, "logit_bias.*256"),
    "an allowed token beyond the vocabulary": ([1], {"allowed_token_ids": (300,)}, "300"),
    "a bad word of too many tokens": ([1], {"bad_words": ("abcdefghi",)}, "9 tokens.*1..8"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_refusal_is_typed_names_the_value_and_changes_nothing(llama, engine, why):
    prompt, options, message = REFUSED[why]
    running = engine.add("running", llama.prompts[5], GREEDY)
    engine.step()
    before = state(engine)
    with pytest.raises(RequestError, match=message):
        engine.add("refused", prompt, SamplingParams(max_tokens=4, **options))
    assert state(engine) == before
    accepted = engine.add("refused", llama.prompts[4], GREEDY)  # its id is free again
    while engine.has_work:
        engine.step()
    outputs = [engine.output(request).outputs[0].token_ids for request in (running, accepted)]
    assert [list(tokens) for tokens in outputs] == [llama.answers[5], llama.answers[4]]


def test_a_refusal_of_several_sequences_takes_all_of_them_back(llama, engine):
    before = state(engine)
    params = SamplingParams(n=3, bad_words=("abcdefghi",))
    with pytest.raises(RequestError):
        engine.add("refused", llama.prompts[5], params)
    assert state(engine) == before


def test_an_id_in_use_is_refused(llama, engine):
    engine.add("mine", llama.prompts[4], GREEDY)
    with pytest.raises(RequestError, match="'mine' is in use"):
        engine.add("mine", llama.prompts[4], GREEDY)
    engine.abort("mine")
    engine.add("mine", llama.prompts[4], GREEDY)
    engine.abort("mine")


def test_a_request_that_can_never_fit_the_pool_is_refused_with_what_fits(llama):
    page_bytes = llama.config.kv_bytes_per_token(4) * 4
    settings = {"max_num_seqs": 1, "max_num_batched_tokens": 1 + 16}
    with llama.load(kv_cache_memory_bytes=6 * page_bytes, **settings) as llm:
        prompt = llama.prompts[5]
        with pytest.raises(PromptTooLongError, match=r"needs 8 KV pages and the pool has 5.* 21 "):
            llm.generate(prompt, SamplingParams(max_tokens=17), use_tqdm=False)
        assert_idle(llm.engine)
        fits = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        (output,) = llm.generate(prompt, fits, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == llama.answers[5][:6]


def test_numpy_token_ids_are_token_ids(llama, engine):
    (output,) = drive(engine, [Arrival(np.array(llama.prompts[5]), GREEDY)])
    assert list(output.outputs[0].token_ids) == llama.answers[5]
    assert all(type(token) is int for token in output.prompt_token_ids)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda path: (path / "config.json").unlink(), ModelError, "config.json"),
        (lambda path: (path / "model.safetensors").unlink(), WeightsError, "safetensors"),
        (lambda path: (path / "model.safetensors").write_bytes(b"junk"), WeightsError, "safet"),
        (lambda path: edit(path, "LlamaFor", "GuanacoFor"), UnsupportedModelError, "Guanaco"),
        (lambda path: edit(path, '"vocab_size": 256', '"vocab_size": 250'), WeightsError, "250"),
    ],
    ids=["no config", "no weights", "corrupt weights", "unknown architecture", "other sizes"],
)
def test_a_damaged_model_is_refused_and_leaves_no_thread(llama, tmp_path, damage, error, message):
    path = tmp_path / "model"
    path.mkdir()
    for file in llama.path.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    damage(path)
    before = threading.active_count()
    with pytest.raises(error, match=message):
        LLM(path, **llama.settings())
    assert threading.active_count() <= before


def edit(path, old, new):
    text = (path / "config.json").read_text()
    assert old in text
    (path / "config.json").write_text(text.replace(old, new))


# Aborting


def test_aborting_at_any_step_frees_everything_and_changes_no_other_output(llama, engine):
    for steps in range(12):
        victim = engine.add("victim", llama.prompts[10], GREEDY)
        other = engine.add("other", llama.prompts[5], GREEDY)
        for _ in range(steps):
            engine.step()
        assert engine.abort("victim") is victim
        assert engine.abort("victim") is None
        while engine.has_work:
            engine.step()
        (aborted,) = engine.output(victim).outputs
        assert aborted.finish_reason == "abort"
        assert list(aborted.token_ids) == llama.answers[10][: len(aborted.token_ids)]
        assert list(engine.output(other).outputs[0].token_ids) == llama.answers[5]
        assert_idle(engine)


# Interruption


def test_a_step_cut_in_two_closes_the_engine(llama, monkeypatch):
    """What a second Ctrl-C does: donated buffers may be lost, so nothing may run on them."""
    with llama.load() as llm:
        engine, calls = llm.engine, []
        real = engine._runner.dispatch

        def interrupted(packed, begun_us):
            calls.append(packed)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return real(packed, begun_us)

        monkeypatch.setattr(engine._runner, "dispatch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(llama.prompts, GREEDY, use_tqdm=False)
        monkeypatch.undo()
        with pytest.raises(EngineClosedError, match="KeyboardInterrupt"):
            llm.generate(llama.prompts[:1], GREEDY, use_tqdm=False)
        assert not engine.scheduler.has_work


MOMENTS = 40 if EXHAUSTIVE else 12


def test_ctrl_c_at_any_moment(llama):
    """Real signals, while the interpreter is anywhere: in the scheduler, or in a program whose
    arguments have been donated."""
    script = f"""
        import os, signal, threading, time
        from jaxserve.llm import LLM
        from jaxserve.core.requests.sampling_params import SamplingParams

        llm = LLM({str(llama.path)!r}, **{llama.settings()!r})
        prompts, greedy = {llama.prompts!r}, SamplingParams(temperature=0, max_tokens={LONGEST})
        sampled = SamplingParams(seed=1, max_tokens={LONGEST}, repetition_penalty=1.1)
        run = lambda: [o.outputs[0].token_ids for o in llm.generate(
            prompts, [greedy, sampled] * 6, use_tqdm=False)]
        expected = run()
        begin = time.monotonic()
        run()
        duration = time.monotonic() - begin
        threads, interrupted = threading.active_count(), 0
        for attempt in range({MOMENTS}):
            timer = threading.Timer(
                duration * attempt / {MOMENTS}, lambda: os.kill(os.getpid(), signal.SIGINT))
            try:
                timer.start()
                run()
                timer.join()
                time.sleep(0.1)
            except KeyboardInterrupt:
                interrupted += 1
            timer.join()
            assert not llm.engine.scheduler.has_work
            assert llm.engine.kv.pool.num_used == 0
            assert run() == expected, attempt
        assert threading.active_count() == threads
        assert interrupted == {MOMENTS}, interrupted
    """
    run_script(script, timeout_s=PATIENCE_S)


# The end


def test_closing_twice_and_calling_a_closed_engine(llama):
    llm = llama.load()
    llm.engine.add("running", llama.prompts[5], GREEDY)
    llm.engine.step()
    before = threading.active_count()
    llm.close()
    llm.close()
    assert_idle(llm.engine)
    assert threading.active_count() <= before
    for call in (
        llm.engine.step,
        lambda: llm.engine.add("late", llama.prompts[5], GREEDY),
        lambda: llm.generate(llama.prompts[5], GREEDY, use_tqdm=False),
        lambda: next(llm.stream(llama.prompts[5], GREEDY)),
    ):
        with pytest.raises(EngineClosedError, match="make a new one"):
            call()
    assert llm.get_metrics()["vllm:request_success_total"].value["abort"] == 1


def test_an_error_of_the_device_closes_the_engine_and_says_so(llama, monkeypatch):
    llm = llama.load()

    def broken(step):
        raise RuntimeError("the device fell off the bus")

    monkeypatch.setattr(llm.engine._runner, "read", broken)
    with pytest.raises(RuntimeError, match="fell off"):
        llm.generate(llama.prompts[5], GREEDY, use_tqdm=False)
    assert_idle(llm.engine)
    with pytest.raises(EngineClosedError, match="RuntimeError: the device fell off the bus"):
        llm.generate(llama.prompts[5], GREEDY, use_tqdm=False)
    llm.close()
