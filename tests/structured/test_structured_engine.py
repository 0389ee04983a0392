"""Output of a given form through the whole engine, in any company."""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import pytest
from finite_language import FiniteLanguage
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tiny_engines import EOS, Arrival, drive, generate, preemptions

from jaxserve.core.errors import RequestError, SnapshotError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.scheduler.policies import POLICIES
from jaxserve.structured import grammars as grammars_module

FREE = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
REGEX = "[abc]{4,6}"
WORDS = FiniteLanguage.words("abc", 4, 6)
GREEDY = SamplingParams(temperature=0, max_tokens=24, structured_outputs={"regex": REGEX})
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-zäß]{0,6}$"},
        "sizes": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "maxItems": 2,
        },
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
SAMPLED = SamplingParams(
    temperature=1.3, top_p=0.9, seed=4, max_tokens=60, structured_outputs={"json": SCHEMA}
)
JSON_TEXT = re.compile(r'\{"name":"[a-zäß]{0,6}","sizes":\[(\d\d?(,\d\d?)?)?\]\}')


def tokens(output):
    return [list(completion.token_ids) for completion in output.outputs]


def texts(output):
    assert output.error is None
    return [completion.text for completion in output.outputs]


@pytest.fixture(scope="module")
def spelled(llm_for):
    """The bytes of each token."""
    tokenizer = llm_for().get_tokenizer()
    return [tokenizer.token_bytes(token) for token in range(256)]


def most_likely(llama, spelled, prompt, language, *, ignore_eos=False):
    """What must be generated greedily after `prompt` in a language, from the oracle's logits."""
    taken, said = [], b""
    while language.goes_on(said):
        logits = llama.logits([*prompt, *taken])[-1]
        allowed = sorted(language.allowed(said, spelled, [EOS], ignore_eos=ignore_eos))
        taken.append(allowed[int(np.argmax(logits[allowed]))])
        if taken[-1] == EOS:
            break
        said += spelled[taken[-1]]
    return taken


# Right, in any company


@pytest.mark.parametrize("scheduler", POLICIES)
def test_tokens_are_the_most_likely_that_the_grammar_allows(llama, llm_for, spelled, scheduler):
    """All prompts at once, of one chunk or several, every other one without a grammar."""
    arrivals = [
        Arrival(prompt, GREEDY if index % 2 else FREE, step=index // 3)
        for index, prompt in enumerate(llama.prompts)
    ]
    outputs = drive(llm_for(scheduler).engine, arrivals)
    for index, (prompt, output) in enumerate(zip(llama.prompts, outputs)):
        if index % 2:
            assert tokens(output) == [most_likely(llama, spelled, prompt, WORDS)]
            assert output.outputs[0].finish_reason == "stop"
            assert re.fullmatch(REGEX, output.outputs[0].text)
        else:
            assert tokens(output) == [llama.answers[index]]


@pytest.fixture(scope="module")
def alone(llama, llm_for):
    """What two structured requests sample with the engine to themselves."""
    prompts = llama.prompts
    return [
        tokens(generate(llm_for(), prompts[9], SAMPLED)),
        tokens(generate(llm_for(), prompts[8], dataclasses.replace(SAMPLED, seed=8, n=3))),
    ]


@pytest.mark.parametrize("scheduler", POLICIES)
def test_the_same_tokens_in_any_batch(llama, llm_for, alone, scheduler):
    several = dataclasses.replace(SAMPLED, seed=8, n=3)
    mine = [Arrival(llama.prompts[9], SAMPLED, 3), Arrival(llama.prompts[8], several, 1)]
    others = [Arrival(p, FREE, step) for step, p in enumerate(llama.prompts)]
    outputs = drive(llm_for(scheduler).engine, [*mine, *others])
    assert [tokens(output) for output in outputs[:2]] == alone
    assert [tokens(output) for output in outputs[2:]] == [[answer] for answer in llama.answers]
    for output in outputs[:2]:
        for text in texts(output):
            assert JSON_TEXT.fullmatch(text)


def test_the_same_tokens_after_a_preemption(llama, llm_for, alone):
    engine = llm_for().engine
    before = preemptions(engine)
    crowd = [Arrival(llama.prompts[9], FREE, priority=-1, tenant=f"t{i}") for i in range(2)]
    several = dataclasses.replace(SAMPLED, seed=8, n=3)
    mine = [Arrival(llama.prompts[9], SAMPLED), Arrival(llama.prompts[8], several)]
    outputs = drive(engine, [*crowd, *mine])
    assert preemptions(engine) > before
    assert [tokens(output) for output in outputs[2:]] == alone


@settings(max_examples=5, deadline=None, phases=[Phase.generate])
@given(data=st.data())
def test_any_mixture_of_formats(llama, llm_for, spelled, data):
    """Grammars beside bans, penalties and logprobs, in the same request or another's."""
    options = st.fixed_dictionaries(
        {},
        optional={
            "structured_outputs": st.sampled_from(
                [{"regex": REGEX}, {"choice": ["yes", "no", "yes!"]}, {"json": SCHEMA}]
            ),
            "temperature": st.sampled_from([0.0, 1.5]),
            "repetition_penalty": st.just(1.3),
            "logit_bias": st.just({70: 3.0}),
            "min_tokens": st.just(2),
            "ignore_eos": st.booleans(),
            "logprobs": st.just(2),
        },
    )
    drawn = data.draw(st.lists(options, min_size=2, max_size=4))
    params = [SamplingParams(**{"seed": 5, "max_tokens": 40} | spec) for spec in drawn]
    arrivals = [
        Arrival(llama.prompts[data.draw(st.integers(0, 11))], p, step=data.draw(st.integers(0, 6)))
        for p in params
    ]
    together = drive(llm_for().engine, arrivals)
    for arrival, output in zip(arrivals, together):
        (by_itself,) = drive(llm_for().engine, [dataclasses.replace(arrival, step=0)])
        assert tokens(output) == tokens(by_itself)
        assert output.error is None
        spec = arrival.params.structured_outputs
        if spec is not None and output.outputs[0].finish_reason == "stop":
            patterns = {"regex": re.compile(REGEX), "json": JSON_TEXT}
            pattern = patterns.get(spec.kind, re.compile("yes!?|no"))
            said = b"".join(spelled[t] for t in output.outputs[0].token_ids if t != EOS)
            assert pattern.fullmatch(said.decode())
            assert output.outputs[0].finish_reason == "stop"


# How it ends


def test_an_output_ends_with_the_token_that_completes_it(llama, llm_for, spelled):
    """It needs no end-of-text token, and no step to find that nothing may follow."""
    (output,) = drive(llm_for().engine, [Arrival(llama.prompts[3], GREEDY)])
    longest = dataclasses.replace(GREEDY, structured_outputs={"regex": "[abc]{5}"})
    (exact,) = drive(llm_for().engine, [Arrival(llama.prompts[3], longest)])
    assert output.outputs[0].finish_reason == exact.outputs[0].finish_reason == "stop"
    assert len(exact.outputs[0].token_ids) == len(exact.outputs[0].text) == 5


def test_an_end_of_text_where_the_grammar_allows_one(llama, llm_for):
    """With a bias for it, it comes as soon as a text is whole."""
    biased = dataclasses.replace(GREEDY, logit_bias={EOS: 100.0})
    (output,) = drive(llm_for().engine, [Arrival(llama.prompts[3], biased)])
    assert len(output.outputs[0].text) == 4
    assert output.outputs[0].token_ids[-1] == EOS
    assert output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("spec", [{"ignore_eos": True}, {"min_tokens": 20}])
def test_it_goes_on_while_it_can_where_no_end_is_wanted(llama, llm_for, spec):
    biased = dataclasses.replace(GREEDY, logit_bias={EOS: 100.0}, **spec)
    (output,) = drive(llm_for().engine, [Arrival(llama.prompts[3], biased)])
    assert len(output.outputs[0].text) == len(output.outputs[0].token_ids) == 6
    assert output.outputs[0].finish_reason == "stop"


def test_one_too_long_ends_by_its_length_or_by_a_stop_string(llama, llm_for):
    short = dataclasses.replace(GREEDY, max_tokens=3)
    stopped = dataclasses.replace(GREEDY, stop=("a", "b", "c"))
    exact = dataclasses.replace(GREEDY, max_tokens=6, ignore_eos=True)
    arrivals = [Arrival(llama.prompts[3], params) for params in (short, stopped, exact)]
    cut, stop, whole = (output.outputs[0] for output in drive(llm_for().engine, arrivals))
    assert (len(cut.text), cut.finish_reason) == (3, "length")
    assert (stop.text, stop.finish_reason) == ("", "stop")
    assert stop.stop_reason in ("a", "b", "c")
    assert (len(whole.text), whole.finish_reason) == (6, "stop")


def test_a_stream_says_what_the_output_says(llama, llm_for, alone):
    deltas = list(llm_for().stream({"prompt_token_ids": llama.prompts[9]}, SAMPLED))
    assert [token for delta in deltas for token in delta.token_ids] == alone[0][0]
    assert JSON_TEXT.fullmatch("".join(delta.text for delta in deltas))
    assert deltas[-1].finish_reason == "stop"


def test_log_probabilities_are_of_what_the_model_would_have_said(llama, llm_for):
    scored = dataclasses.replace(GREEDY, logprobs=1)
    (output,) = drive(llm_for().engine, [Arrival(llama.prompts[3], scored)])
    sampled = list(output.outputs[0].token_ids)
    expected = llama.logprobs([*llama.prompts[3], *sampled])[len(llama.prompts[3]) - 1 :]
    for place, (token, entry) in enumerate(zip(sampled, output.outputs[0].logprobs)):
        assert entry[token].logprob == pytest.approx(expected[place][token], abs=1e-3)


def test_ended_and_aborted_requests_leave_the_others_as_they_are(llama, llm_for, alone):
    engine = llm_for().engine
    request = engine.add("kept", llama.prompts[9], SAMPLED)
    for number in range(12):
        engine.add(f"aborted-{number}", llama.prompts[number], GREEDY)
        for _ in range(number % 4):
            engine.step()
        engine.abort(f"aborted-{number}")
    while engine.has_work:
        engine.step()
    assert tokens(engine.output(request)) == alone[0]


# What goes wrong


def test_a_grammar_that_grows_too_large_fails_alone(llama, llm_for):
    huge = {"regex": "((a{1,100}){1,100}){1,100}"}
    bad = dataclasses.replace(FREE, max_tokens=90, structured_outputs=huge)
    failed, fine, other = drive(
        llm_for().engine,
        [
            Arrival(llama.prompts[1], bad),
            Arrival(llama.prompts[1], FREE),
            Arrival(llama.prompts[3], GREEDY),
        ],
    )
    assert failed.outputs[0].finish_reason == "error"
    assert "structured_outputs: " in failed.error and "too many" in failed.error
    assert set(failed.outputs[0].text) == {"a"}
    assert tokens(fine) == [llama.answers[1]]
    assert other.outputs[0].finish_reason == "stop"


def test_when_nothing_that_is_allowed_is_left_the_request_alone_fails(llama, llm_for):
    nothing = dataclasses.replace(GREEDY, allowed_token_ids=(200,))
    failed, fine = drive(
        llm_for().engine, [Arrival(llama.prompts[1], nothing), Arrival(llama.prompts[1], FREE)]
    )
    assert "no token to sample" in failed.error
    assert tokens(fine) == [llama.answers[1]]


def test_a_bad_grammar_is_refused_and_changes_nothing(llama, llm):
    bad = SamplingParams(structured_outputs={"regex": "a("})
    with pytest.raises(RequestError, match=r"structured_outputs.regex: .*unclosed"):
        llm.engine.preparation(bad).result()
    with pytest.raises(RequestError, match=r"structured_outputs.regex: .*unclosed"):
        llm.engine.add("bad", llama.prompts[1], bad)
    refused, fine = llm.generate(llama.prompts[1:3], [bad, FREE], use_tqdm=False)
    assert "unclosed" in refused.error
    assert tokens(fine) == [llama.answers[2]]


# Promises


def test_nothing_is_compiled_for_it_once_the_engine_is_ready(llama):
    events = []

    def listen(event: str, duration_s: float, **_) -> None:
        if event.startswith("/jax/core/compile"):
            events.append(event)

    jax.clear_caches()  # what other tests ran must not hide what this one would compile
    with llama.load() as llm:
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            several = dataclasses.replace(SAMPLED, n=3)
            kinds = (GREEDY, SAMPLED, FREE, several)
            drive(llm.engine, [Arrival(llama.prompts[i], kinds[i % 4], i) for i in range(12)])
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
    assert events == []


def test_steps_without_a_grammar_upload_no_masks(llama, llm_for):
    """They are given masks that have lain on the device since the start, and read no tokens."""
    general, given = llm_for().engine._runner._kinds.general, []
    run = general.run

    def seen(state, key, hidden, rows, masks):
        given.append(masks)
        return run(state, key, hidden, rows, masks)

    general.run = seen
    try:
        sampled = dataclasses.replace(FREE, temperature=1.0, seed=1)
        drive(llm_for().engine, [Arrival(llama.prompts[i], sampled) for i in (3, 6, 9)])
        assert given and all(isinstance(array, jax.Array) for array in given)
        drive(llm_for().engine, [Arrival(llama.prompts[3], GREEDY)])
        assert isinstance(given[-1], np.ndarray)
    finally:
        del general.run


@pytest.mark.parametrize("steps", [0, 1, 6, 30])
def test_a_snapshot_after_any_step(llama, llm_for, alone, tmp_path, steps):
    several = dataclasses.replace(SAMPLED, seed=8, n=3)
    source, target = llm_for(), llm_for("vllm")
    streams = [
        source.stream({"prompt_token_ids": llama.prompts[9]}, SAMPLED),
        source.stream({"prompt_token_ids": llama.prompts[8]}, several),
    ]
    for _ in range(steps):
        source.engine.step()
    source.snapshot(tmp_path)
    outputs = [stream.result() for stream in target.restore(tmp_path)]
    assert [tokens(output) for output in outputs] == alone
    assert all(JSON_TEXT.fullmatch(text) for output in outputs for text in texts(output))
    for stream in streams:
        stream.close()
    while source.engine.has_work:
        source.engine.step()


def test_a_snapshot_with_a_grammar_that_is_refused_changes_nothing(
    llama, llm_for, tmp_path, monkeypatch
):
    """As by an engine whose compiler knows less."""
    source, target = llm_for(), llm_for("vllm")
    params = dataclasses.replace(GREEDY, structured_outputs={"regex": "[ab]{3}x"})
    stream = source.stream({"prompt_token_ids": llama.prompts[3]}, params)
    source.snapshot(tmp_path)
    stream.close()

    def refused(vocabulary, spec):
        raise RequestError(f"structured_outputs.{spec.kind}: unknown.")

    monkeypatch.setattr(grammars_module, "Grammar", refused)
    with pytest.raises(SnapshotError, match=r"request .* is refused .*regex: unknown"):
        target.restore(tmp_path)
    assert not target.engine.scheduler.has_work
    while source.engine.has_work:
        source.engine.step()


def test_a_grammar_that_was_prepared_is_not_compiled_again(llama, llm, monkeypatch):
    """Though many others were, since."""
    params = dataclasses.replace(GREEDY, structured_outputs={"regex": "[ab]{3}y"})
    grammar = llm.engine.preparation(params).result()
    monkeypatch.setattr(grammars_module, "Grammar", None)
    llm.engine._input._grammars._cached.clear()
    request = llm.engine.add("prepared", llama.prompts[3], params, grammar=grammar)
    while llm.engine.has_work:
        llm.engine.step()
    assert re.fullmatch("[ab]{3}y", llm.engine.output(request).outputs[0].text)
