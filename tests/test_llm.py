"""The offline API: prompts of every form, batches, streams, and the embedded model."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import pty
import re
import signal
import subprocess
import sys
import threading
import warnings

import pytest
from golden_prompts import check_golden, golden_prompts
from patience import PATIENCE_S
from tiny_engines import LONGEST, assert_idle, generate

from jaxserve.core.errors import (
    ConfigError,
    EngineClosedError,
    PromptTooLongError,
    RequestError,
)
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.llm import LLM

GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)


def token_ids(output):
    return list(output.outputs[0].token_ids)


# Batches


def test_outputs_come_in_the_order_of_the_prompts(llama, llm):
    params = [
        SamplingParams(temperature=0, ignore_eos=True, max_tokens=1 + index)
        for index in range(len(llama.prompts))
    ]
    outputs = llm.generate(llama.prompts, params, use_tqdm=False)
    for index, output in enumerate(outputs):
        assert list(output.prompt_token_ids) == llama.prompts[index]
        assert token_ids(output) == llama.answers[index][: 1 + index]
        assert output.finished and output.error is None


def test_every_form_of_a_prompt(llm):
    ids = llm.get_tokenizer().encode("hello")
    forms = ["hello", ids, {"prompt_token_ids": ids}, {"prompt": "hello"}]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    outputs += [generate(llm, form, GREEDY) for form in forms]
    assert {tuple(token_ids(output)) for output in outputs} == {tuple(token_ids(outputs[0]))}
    assert [output.prompt for output in outputs] == ["hello", None, None, "hello"] * 2
    assert all(list(output.prompt_token_ids) == ids for output in outputs)


def test_prompts_of_a_generator(llm):
    outputs = llm.generate((text for text in ("hello", "Hi")), GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["hello", "Hi"]


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_of_a_batch_a_bad_prompt_fails_alone(llama, llm):
    good = llama.prompts[5]
    bad = [[999], [], [3] * 500, {"prompt": [1]}, None, 17, "\ud800"]
    mixed = [prompt for each in bad for prompt in (each, good)]
    with pytest.warns(UserWarning, match="7 of 14 prompts failed, the first at index 0: .*999"):
        outputs = llm.generate(mixed, GREEDY, use_tqdm=False)
    for refused, fine in zip(outputs[::2], outputs[1::2]):
        assert refused.outputs[0].finish_reason == "error"
        assert refused.finished and refused.error
        assert token_ids(refused) == []
        assert token_ids(fine) == llama.answers[5]
        assert fine.error is None
    assert "999" in outputs[0].error
    with pytest.warns(UserWarning, match=r"shorten it to at most \d+\. See the `error`"):
        llm.generate([[3] * 500, good], GREEDY, use_tqdm=False)
    assert len({output.request_id for output in outputs}) == len(outputs)


def test_a_single_bad_prompt_raises(llm):
    with pytest.raises(PromptTooLongError, match="500 tokens"):
        llm.generate([3] * 500, GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="prompt_token_ids"):
        llm.generate({"text": "hello"}, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    "messages",
    ["hi", {"role": "user", "content": "hi"}, None, ["hi", "yo"], [("user", "hi")]],
    ids=str,
)
def test_what_is_no_conversation_raises(llm, messages):
    with pytest.raises(RequestError, match=r"messages is .*give a conversation, such as"):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_messages_and_lists_of_texts_are_no_prompt(llm):
    with pytest.raises(RequestError, match="messages of a conversation; give them to `chat`"):
        llm.generate(MESSAGES, GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match=r"a list with text; give one text, .* several prompts"):
        llm.stream(["hello", "Hi"], GREEDY)


def test_an_argument_for_all_prompts_fails_once(llama, llm):
    for wrong, words in (
        ({"sampling_params": {"n": 2}}, "must be a SamplingParams"),
        ({"lora_request": "sql"}, "'sql'; it must be a LoRARequest"),
    ):
        with pytest.raises(RequestError, match=words):
            llm.generate(llama.prompts[:2], use_tqdm=False, **wrong)


@pytest.mark.parametrize("field", ["sampling_params", "priority"])
def test_lists_of_another_length_are_refused(llama, llm, field):
    values = {"sampling_params": [GREEDY], "priority": [1]}[field]
    arguments = {"sampling_params": GREEDY} | {field: values}
    with pytest.raises(RequestError, match=f"{field} has 1 entries for 2 prompts"):
        llm.generate(llama.prompts[:2], use_tqdm=False, **arguments)


def test_a_lower_priority_number_runs_first(llama, llm):
    prompts = [llama.prompts[5]] * 12
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, priority=range(12, 0, -1))
    firsts = [output.metrics.first_token_us for output in outputs]
    assert firsts == sorted(firsts, reverse=True)
    assert firsts[-1] < firsts[0]


def test_one_priority_is_that_of_all_prompts(llama, llm):
    outputs = llm.generate(llama.prompts[:2], GREEDY, use_tqdm=False, priority=3)
    assert [output.error for output in outputs] == [None, None]


MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]


@pytest.fixture
def chatty(llm, monkeypatch):
    """A model whose chat template shows what it gets."""
    template = (
        "{{ tools | length if tools }}{{ mood }}"
        "{% for m in messages %}<{{ m.content }}>{% endfor %}"
        "{% if add_generation_prompt %}:{% endif %}"
    )
    monkeypatch.setattr(llm.get_tokenizer(), "_chat_templates", {"default": template})
    return llm


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({}, "<Hi><Well>:"),
        ({"add_generation_prompt": False}, "<Hi><Well>"),
        ({"continue_final_message": True}, "<Hi><Well"),
        ({"tools": [{"name": "f"}]}, "1<Hi><Well>:"),
        ({"chat_template_kwargs": {"mood": "glad"}}, "glad<Hi><Well>:"),
        ({"chat_template": "{{ messages[1].content }}!"}, "Well!"),
    ],
)
def test_a_chat_is_laid_out_as_told(chatty, options, prompt):
    (output,) = chatty.chat(MESSAGES, GREEDY, use_tqdm=False, priority=1, **options)
    decode = chatty.get_tokenizer().decode
    assert decode(output.prompt_token_ids) == decode(chatty.chat_prompt(MESSAGES, **options))
    assert decode(output.prompt_token_ids) == prompt
    streamed = "".join(delta.text for delta in chatty.stream_chat(MESSAGES, GREEDY, **options))
    assert streamed == output.outputs[0].text


def test_chats_refuse_keywords_that_they_do_not_know(chatty):
    """They were variables of the template once, and a misspelt one had no effect."""
    for call in (chatty.chat, chatty.stream_chat, chatty.chat_prompt):
        with pytest.raises(TypeError, match="mood"):
            call(MESSAGES, mood="glad")


def test_template_variables_that_are_parameters_are_refused_by_name(chatty):
    for call in (chatty.chat, chatty.stream_chat, chatty.chat_prompt):
        with pytest.raises(RequestError, match="chat_template_kwargs must not set 'tools'; it is"):
            call(MESSAGES, chat_template_kwargs={"tools": []})


def test_one_host_has_none_to_follow(llm):
    with pytest.raises(ConfigError, match="there is one host alone"):
        llm.engine.follow()


def test_times_of_a_request_are_in_order(llama, llm):
    times = generate(llm, llama.prompts[9], GREEDY).metrics
    assert times.arrival_us <= times.first_token_us <= times.finish_us
    assert 0 <= times.queue_us <= times.first_token_us - times.arrival_us
    assert times.cached_tokens == 0


# Streams


def test_a_stream_is_the_output_in_pieces(llama, llm):
    whole = generate(llm, llama.prompts[9], GREEDY).outputs[0]
    deltas = list(llm.stream(llama.prompts[9], GREEDY))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == list(whole.token_ids)
    assert [delta.finish_reason for delta in deltas] == [None] * (LONGEST - 1) + ["length"]


def test_streams_and_batches_side_by_side_lose_nothing(llama, llm):
    streams = [llm.stream(llama.prompts[index], GREEDY) for index in (4, 9)]
    collected = [[*next(stream).token_ids] for stream in streams]
    (output,) = llm.generate(llama.prompts[5], GREEDY, use_tqdm=False)
    assert token_ids(output) == llama.answers[5]
    for tokens, stream in zip(collected, streams):
        tokens += [token for delta in stream for token in delta.token_ids]
    assert collected == [llama.answers[4], llama.answers[9]]


def test_it_says_what_it_is_and_is_not_pickled(llm):
    assert re.fullmatch(r"<LLM .* on 1 x cpu: weights .* tokens>", repr(llm))
    with pytest.raises(TypeError, match="make one in each process"):
        pickle.dumps(llm)


def test_threads_take_turns(llama, llm):
    """Their calls and streams give what they give alone, also when one is dropped meanwhile."""
    prompts = [llama.prompts[place] for place in (2, 5, 7)]
    alone = [token_ids(generate(llm, prompt, GREEDY)) for prompt in prompts]
    found, begin = {}, threading.Barrier(6)

    def call(number):
        begin.wait()
        found[number] = token_ids(generate(llm, prompts[number], GREEDY))

    def stream(number):
        begin.wait()
        deltas = llm.stream(prompts[number], GREEDY)
        if number == 2:
            next(deltas)
            return
        found[3 + number] = [token for delta in deltas for token in delta.token_ids]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3) for run in (call, stream)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [found[i] for i in range(3)] == alone
    assert [found[3], found[4]] == alone[:2]
    while llm.engine.has_work:  # A stream that is dropped out of turn runs to its end.
        llm.engine.step()
    assert_idle(llm.engine)


def test_a_stream_that_is_collected_within_a_step_runs_to_its_end(llama, llm):
    stream = llm.stream(llama.prompts[4], GREEDY)
    next(stream)
    with llm._lock:  # As the thread that steps has it.
        del stream
        gc.collect()
        assert not llm.has_work and llm.engine.has_work
    while llm.engine.has_work:
        llm.engine.step()


def test_a_fork_is_told_that_it_has_no_engine(llama, llm):
    """Also by calls that would wait for a thread that the fork has not."""
    read, write = os.pipe()
    has_turn, forked = threading.Event(), threading.Event()

    def have_turn():
        with llm._lock:
            has_turn.set()
            forked.wait()

    thread = threading.Thread(target=have_turn)
    thread.start()
    has_turn.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX's own, of the fork.
        child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            llm.generate(llama.prompts[2], use_tqdm=False)
        except EngineClosedError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    forked.set()
    thread.join()
    os.close(write)
    with os.fdopen(read) as said:
        assert "'spawn'" in said.read()
    os.waitpid(child, 0)
    assert len(llm.generate(llama.prompts[2], use_tqdm=False)) == 1


@pytest.mark.parametrize("model", [3, b"tiny", ""])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(ConfigError, match="give a name, a path or"):
        LLM(model)


def test_leaving_a_stream_aborts_its_request(llama, llm):
    stream = llm.stream(llama.prompts[4], GREEDY)
    next(stream)
    stream.close()
    assert_idle(llm.engine)


def test_a_stream_refuses_a_bad_prompt_at_once(llm):
    with pytest.raises(RequestError, match="999"):
        llm.stream([999], GREEDY)


# The embedded model; the rest of what is tested on it is in tests/real_model


def test_smollm2_continues_as_transformers_does(smollm2_path):
    golden = golden_prompts("chat_sky", "one_letter", "code_python", "chinese")
    prompts = [entry.prompt_token_ids for entry in golden]
    params = SamplingParams(temperature=0, max_tokens=16)
    settings = {"max_num_seqs": 1, "max_model_len": 128, "max_num_batched_tokens": 1 + 32}
    with LLM(smollm2_path, **settings) as llm:
        check_golden(golden, llm.generate(prompts, params, use_tqdm=False))
        tokenizer = llm.get_tokenizer()
        texts = [entry.prompt for entry in golden_prompts()]
        expected = [entry.prompt_token_ids for entry in golden_prompts()]
        assert [tokenizer.encode(text, add_special_tokens=False) for text in texts] == expected


def test_options_of_the_wrong_type_are_refused_and_leave_no_request(llama, llm):
    prompt = llama.prompts[4]
    with pytest.raises(RequestError, match="priority is 'a'"):
        llm.generate(prompt, GREEDY, priority=["a"])
    with pytest.raises(RequestError, match="must be a SamplingParams"):
        llm.generate(prompt, {"temperature": 0})
    with pytest.raises(RequestError, match="give a list"):
        llm.generate(prompt, GREEDY, priority=1.5)
    with pytest.warns(UserWarning, match="1 of 2 prompts failed"):
        refused, served = llm.generate([prompt, prompt], GREEDY, use_tqdm=False, priority=["a", 1])
    assert "priority" in refused.error
    assert list(served.outputs[0].token_ids) == llama.answers[4]


def test_no_thread_outlives_a_progress_bar(llama, llm):
    before = set(threading.enumerate())
    llm.generate(llama.prompts[4], GREEDY, use_tqdm=True)
    assert set(threading.enumerate()) == before


def test_a_start_draws_bars_on_terminals_only(ahead_of_time, llama):
    """Under a pseudo-terminal; the tests' own stderr is none."""
    script = (
        "import sys; from jaxserve import LLM\n"
        "LLM(sys.argv[1], max_model_len=64, max_num_seqs=1, max_num_batched_tokens=33).close()"
    )
    primary, secondary = pty.openpty()
    run = [sys.executable, "-c", script, str(llama.path)]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(run, stderr=secondary, stdout=subprocess.PIPE, env=environment) as child:
        os.close(secondary)
        shown = b""
        with contextlib.suppress(OSError):  # Linux tells the end of a terminal by EIO.
            while piece := os.read(primary, 1 << 16):
                shown += piece
        assert child.stdout.read() == b""
    os.close(primary)
    assert child.returncode == 0, shown
    assert b"Loading weights" in shown and b"Preparing programs" in shown
    quiet = subprocess.run(run, capture_output=True, check=True, timeout=PATIENCE_S)
    assert quiet.stderr == b""
