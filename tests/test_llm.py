"""The offline API: prompts of every form, batches, streams, and the embedded model."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from tiny_engines import LONGEST, assert_idle, generate

from jaxserve.errors import PromptTooLongError, RequestError
from jaxserve.llm import LLM
from jaxserve.sampling_params import SamplingParams

GOLDEN = Path(__file__).parent / "models" / "golden" / "smollm2_greedy.json"
GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
DECIDED = 1e-3
"""A lead of one logit over the next that another order of summation cannot take back."""


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
    forms = ["hello", ids, {"prompt_token_ids": ids}]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    outputs += [generate(llm, form, GREEDY) for form in forms]
    assert {tuple(token_ids(output)) for output in outputs} == {tuple(token_ids(outputs[0]))}
    assert [output.prompt for output in outputs] == ["hello", None, None] * 2
    assert all(list(output.prompt_token_ids) == ids for output in outputs)


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_of_a_batch_a_bad_prompt_fails_alone(llama, llm):
    good = llama.prompts[5]
    bad = [[999], [], [3] * 500, {"prompt": [1]}, None, 17, "\ud800"]
    mixed = [prompt for each in bad for prompt in (each, good)]
    outputs = llm.generate(mixed, GREEDY, use_tqdm=False)
    for refused, fine in zip(outputs[::2], outputs[1::2]):
        assert refused.outputs[0].finish_reason == "error"
        assert refused.finished and refused.error
        assert token_ids(refused) == []
        assert token_ids(fine) == llama.answers[5]
        assert fine.error is None
    assert "999" in outputs[0].error
    assert len({output.request_id for output in outputs}) == len(outputs)


def test_a_single_bad_prompt_raises(llm):
    with pytest.raises(PromptTooLongError, match="500 tokens"):
        llm.generate([3] * 500, GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="prompt_token_ids"):
        llm.generate({"text": "hello"}, GREEDY, use_tqdm=False)


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


def test_leaving_a_stream_aborts_its_request(llama, llm):
    stream = llm.stream(llama.prompts[4], GREEDY)
    next(stream)
    stream.close()
    assert_idle(llm.engine)


def test_a_stream_refuses_a_bad_prompt_at_once(llm):
    with pytest.raises(RequestError, match="999"):
        llm.stream([999], GREEDY)


# The embedded model


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    with LLM(smollm2_path, max_num_seqs=32, max_model_len=1024) as llm:
        yield llm


def test_smollm2_continues_as_transformers_does(smollm2):
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))["prompts"]
    assert len(golden) >= 20
    params = SamplingParams(temperature=0, max_tokens=48)
    prompts = [entry["prompt_token_ids"] for entry in golden]
    outputs = smollm2.generate(prompts, params, use_tqdm=False)
    whole = 0
    for entry, output in zip(golden, outputs):
        expected = entry["output_token_ids"]
        close_calls = [i for i, margin in enumerate(entry["margins"]) if margin < DECIDED]
        ours = token_ids(output)
        if ours != expected:
            place = next(i for i, (a, b) in enumerate(zip(ours, expected)) if a != b)
            assert place in close_calls, f"{entry['name']} differs at {place}"
        whole += ours == expected
    assert whole >= len(golden) - 2
    texts = [entry["prompt"] for entry in golden]
    tokenizer = smollm2.get_tokenizer()
    assert [tokenizer.encode(text, add_special_tokens=False) for text in texts] == prompts


def test_smollm2_answers_a_question(smollm2):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=32)
    (output,) = smollm2.chat(question, params, use_tqdm=False)
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert "<|im_end|>" not in output.outputs[0].text
    streamed = "".join(delta.text for delta in smollm2.stream_chat(question, params))
    assert streamed == output.outputs[0].text


def test_wishes_of_the_wrong_type_are_refused_and_leave_nothing(llama, llm):
    prompt = llama.prompts[4]
    with pytest.raises(RequestError, match="priority is 'a'"):
        llm.generate(prompt, GREEDY, priority=["a"])
    with pytest.raises(RequestError, match="must be a SamplingParams"):
        llm.generate(prompt, {"temperature": 0})
    with pytest.raises(RequestError, match="give a list"):
        llm.generate(prompt, GREEDY, priority=3)
    refused, served = llm.generate([prompt, prompt], GREEDY, use_tqdm=False, priority=["a", 1])
    assert "priority" in refused.error
    assert list(served.outputs[0].token_ids) == llama.answers[4]


def test_one_bad_conversation_fails_alone(smollm2):
    good = [{"role": "user", "content": "Hi!"}]
    params = SamplingParams(temperature=0, max_tokens=2)
    refused, served = smollm2.chat([[{"foo": "x"}], good], params, use_tqdm=False)
    assert refused.outputs[0].finish_reason == "error"
    assert "role" in refused.error
    assert len(served.outputs[0].token_ids) == 2


def test_no_thread_outlives_a_progress_bar(llama, llm):
    before = set(threading.enumerate())
    llm.generate(llama.prompts[4], GREEDY, use_tqdm=True)
    assert set(threading.enumerate()) == before
