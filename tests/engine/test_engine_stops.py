"""Where a sequence ends and what it says of it: length, end of text, token ids, strings."""

from __future__ import annotations

import dataclasses

import pytest
from tiny_engines import EOS, LONGEST, Arrival, drive, generate

from jaxserve.core.requests.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST)


@pytest.fixture(scope="module")
def ending(llama):
    """A prompt whose answer has an end-of-text token in its midst, and that answer."""
    index = next(i for i, answer in enumerate(llama.answers) if EOS in answer[4:-4])
    return llama.prompts[index], llama.answers[index]


@pytest.fixture(scope="module")
def spelling(llm_for, llama):
    """Sampling of eight letters and a space, so that the output is text, and that text."""
    letters = tuple(llm_for().get_tokenizer().encode("abcdefgh "))
    params = SamplingParams(seed=3, max_tokens=LONGEST, allowed_token_ids=letters)
    output = generate(llm_for(), llama.prompts[5], params).outputs[0]
    assert len(output.text) == LONGEST
    return params, output.text


def finish(output):
    (completion,) = output.outputs
    return completion.finish_reason, completion.stop_reason


# Tokens


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens(llama, llm, max_tokens):
    output = generate(llm, llama.prompts[9], dataclasses.replace(GREEDY, max_tokens=max_tokens))
    assert list(output.outputs[0].token_ids) == llama.answers[9][:max_tokens]
    assert finish(output) == ("length", None)


def test_without_max_tokens_it_goes_on_to_the_context_limit(llama, llm):
    prompt = llama.prompts[-1]
    unbounded = dataclasses.replace(GREEDY, max_tokens=None, ignore_eos=True)
    output = generate(llm, prompt, unbounded)
    assert len(prompt) + len(output.outputs[0].token_ids) == 128
    assert list(output.outputs[0].token_ids[:LONGEST]) == llama.answers[-1]
    assert finish(output) == ("length", None)


def test_end_of_text(llm, ending):
    prompt, answer = ending
    output = generate(llm, prompt, GREEDY)
    assert list(output.outputs[0].token_ids) == answer[: answer.index(EOS) + 1]
    assert finish(output) == ("stop", None)
    ignored = generate(llm, prompt, dataclasses.replace(GREEDY, ignore_eos=True))
    assert list(ignored.outputs[0].token_ids) == answer
    assert finish(ignored) == ("length", None)


def test_the_token_that_ends_it_adds_no_text(llm, ending):
    prompt, answer = ending
    tokenizer = llm.get_tokenizer()
    output = generate(llm, prompt, GREEDY).outputs[0]
    assert output.text == tokenizer.decode(answer[: answer.index(EOS)])


def test_stop_token_ids(llama, llm):
    answer = llama.answers[9]
    stops = (answer[5], answer[8])
    output = generate(llm, llama.prompts[9], dataclasses.replace(GREEDY, stop_token_ids=stops))
    assert list(output.outputs[0].token_ids) == answer[:6]
    assert finish(output) == ("stop", answer[5])


def test_min_tokens_holds_off_every_end(llama, llm, ending):
    prompt, answer = ending
    stop = answer[1]
    least = answer.index(EOS) + 2
    params = dataclasses.replace(GREEDY, min_tokens=least, stop_token_ids=(stop,))
    output = generate(llm, prompt, params).outputs[0]
    sampled = list(output.token_ids)
    assert len(sampled) >= least
    assert not {EOS, stop} & set(sampled[:least])
    assert sampled[0] == answer[0] and sampled[1] != stop
    # What stands in for the stop is the best of the other tokens.
    logits = llama.logits([*prompt, *sampled])[len(prompt)].copy()
    logits[[stop, EOS]] = -float("inf")
    assert sampled[1] == logits.argmax()


# Strings


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_stop_string(llama, llm, spelling, length, include):
    params, text = spelling
    stop = text[9 : 9 + length]
    end = text.index(stop)
    stopping = dataclasses.replace(params, stop=(stop, "never"), include_stop_str_in_output=include)
    output = generate(llm, llama.prompts[5], stopping)
    assert output.outputs[0].text == text[:end] + (stop if include else "")
    assert len(output.outputs[0].token_ids) == end + len(stop)
    assert finish(output) == ("stop", stop)


@pytest.mark.parametrize("start", [0, 3, 12])
def test_streaming_never_shows_a_part_of_a_stop_string(llama, llm, spelling, start):
    params, text = spelling
    stop = text[start : start + 4]
    expected = text[: text.index(stop)]
    shown = ""
    for delta in llm.stream(llama.prompts[5], dataclasses.replace(params, stop=stop)):
        shown += delta.text
        assert expected.startswith(shown)
    assert shown == expected
    assert (delta.finish_reason, delta.stop_reason) == ("stop", stop)


def test_what_only_began_a_stop_string_is_shown_in_the_end(llama, llm, spelling):
    params, text = spelling
    deltas = list(llm.stream(llama.prompts[5], dataclasses.replace(params, stop=text[-3:] + "!")))
    assert "".join(delta.text for delta in deltas) == text
    # The last three characters may be the beginning of the string until the very end.
    assert deltas[-1].text.endswith(text[-3:])
    assert deltas[-1].finish_reason == "length"


def test_min_tokens_holds_off_a_stop_string(llama, llm, spelling):
    params, text = spelling
    stop = text[2]
    params = dataclasses.replace(params, stop=stop, min_tokens=10)
    output = generate(llm, llama.prompts[5], params).outputs[0]
    end = text.find(stop, 10)
    assert output.text == (text if end < 0 else text[:end])
    assert len(output.token_ids) > 10


def test_without_detokenizing_there_are_tokens_and_no_text(llama, llm):
    output = generate(llm, llama.prompts[9], dataclasses.replace(GREEDY, detokenize=False))
    assert list(output.outputs[0].token_ids) == llama.answer(9, LONGEST, False)
    assert output.outputs[0].text == ""


def test_sequences_of_a_request_end_each_in_their_own_way(llama, llm, spelling):
    params, _ = spelling
    several = dataclasses.replace(params, n=4, stop="h", max_tokens=5)
    (output,) = drive(llm.engine, [Arrival(llama.prompts[5], several)])
    reasons = {completion.finish_reason for completion in output.outputs}
    for completion in output.outputs:
        assert "h" not in completion.text
        assert (completion.finish_reason == "stop") == (completion.stop_reason == "h")
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 5
    assert reasons == {"stop", "length"}
