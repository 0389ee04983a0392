"""Bounded reasoning: what may be sampled, and through the whole engine, in any batch."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
from finite_language import FiniteLanguage
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engines import EOS, Arrival, drive, generate, preemptions

from jaxserve.core.errors import RequestError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.requests.structured_outputs import StructuredOutputs
from jaxserve.structured.grammar import Grammar
from jaxserve.structured.matcher import advance
from jaxserve.structured.thinking import ThinkingMarks, ThinkingMatcher
from jaxserve.structured.vocabulary import Vocabulary

OPEN, CLOSE = b"<think>", b"</think>"
REGEX = "[abc]{4,6}"
WORDS = FiniteLanguage.words("abc", 4, 6)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def tokenizer(llm_for):
    return llm_for().get_tokenizer()


@pytest.fixture(scope="module")
def spelled(tokenizer):
    """The bytes of each token."""
    return [tokenizer.token_bytes(token) for token in range(256)]


@pytest.fixture(scope="module")
def open_prompts(llama, tokenizer):
    """Prompts of several lengths that end in the opening tag."""
    tag = tokenizer.encode(OPEN.decode(), add_special_tokens=False)
    return [prompt + tag for prompt in llama.prompts[:10]]


def allowed_by(mask, count=256):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:count])


class ReasoningTokens:
    """A tokenizer whose tags are tokens, with tokens beside them that merge what follows a tag."""

    tokens = (b"", b"a", b"b", b" ", b"<", b"/think", b">", b">a", b"> ", CLOSE, OPEN, b"think>")
    special_token_ids = frozenset({0})
    bos_token_id = None
    chat_template = None

    def __init__(self, whole: bool) -> None:
        """`whole`: each tag is one token."""
        self.vocab_size = len(self.tokens)
        self._whole = whole

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if text == CLOSE.decode():
            return [9] if self._whole else [4, 5, 6]
        if text == OPEN.decode():
            return [10] if self._whole else [4, 11]
        return [self.tokens.index(bytes([byte])) for byte in text.encode()]


@functools.cache
def made(whole):
    tokens = ReasoningTokens(whole)
    vocabulary = Vocabulary(tokens, tokens.vocab_size, [0])
    grammar = Grammar(vocabulary, StructuredOutputs(regex="[ab]{3}"))
    return tokens, ThinkingMarks(tokens, tokens.vocab_size), grammar


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    whole=st.booleans(),
    budget=st.integers(-1, 6),
    has_grammar=st.booleans(),
    begins_open=st.booleans(),
)
def test_at_most_the_budget_and_then_an_answer(data, whole, budget, has_grammar, begins_open):
    tokens, marks, grammar = made(whole)
    answer = grammar.matcher(ignore_eos=False) if has_grammar else None
    matcher = ThinkingMatcher(marks, budget, answer, begins_open)
    taken = []
    while len(taken) < 20 and not matcher.complete(len(taken)):
        ahead = data.draw(st.integers(0, 3))
        free = not matcher.waits_for(len(taken) + ahead)
        allowed = allowed_by(matcher.mask, tokens.vocab_size).tolist()
        if free and ahead:
            assert len(allowed) == tokens.vocab_size
        taken.append(data.draw(st.sampled_from(allowed)))
        if has_grammar and taken[-1] == 0:
            break
        for _ in range(2):  # A token may be told twice.
            advance([(matcher, len(taken) - 1, taken[-1])])
        assert matcher.num_tokens == len(taken)
    texts = [
        OPEN * begins_open + b"".join(map(tokens.token_bytes, taken[:count]))
        for count in range(len(taken) + 1)
    ]
    begins = [text.lstrip().startswith(OPEN) for text in texts]
    if not begins[-1]:
        if has_grammar:
            assert len(texts[-1]) <= 3 and not texts[-1].strip(b"ab")
        return
    _, closed, content = texts[-1].partition(CLOSE)
    if closed and has_grammar:
        assert len(content.strip()) <= 3 and not content.strip().strip(b"ab")
        assert len(content.strip()) == 3 or not matcher.complete(len(taken))
    if budget >= 0:
        end = next((count for count, text in enumerate(texts) if CLOSE in text), len(taken) + 1)
        assert end - begins.index(True) <= budget + len(marks.close_ids)


def most_likely(llama, spelled, prompt, budget, *, has_grammar=False):
    """What must be generated greedily after a prompt that opens the reasoning."""
    close = [spelled.index(bytes([byte])) for byte in CLOSE]
    taken, said = [], b""
    while len(taken) < budget:
        logits = llama.logits([*prompt, *taken])[-1].copy()
        if has_grammar:
            logits[EOS] = -np.inf
        taken.append(int(np.argmax(logits)))
    taken += close
    while len(taken) < GREEDY.max_tokens:
        logits = llama.logits([*prompt, *taken])[-1]
        if not has_grammar:
            taken.append(int(np.argmax(logits)))
            continue
        if not WORDS.goes_on(said):
            break
        allowed = sorted(WORDS.allowed(said, spelled, [EOS], ignore_eos=True))
        taken.append(allowed[int(np.argmax(logits[allowed]))])
        said += spelled[taken[-1]]
    return taken


def bounded(budget, **changes):
    return dataclasses.replace(GREEDY, thinking_token_budget=budget, **changes)


def tokens_of(output):
    assert output.error is None
    return [list(completion.token_ids) for completion in output.outputs]


def test_the_most_likely_tokens_but_for_the_end_of_the_reasoning(
    llama, llm_for, spelled, open_prompts
):
    """Budgets of every phase, beside requests without any, in a batch that preempts."""
    cases = [(0, False), (1, True), (5, False), (9, True), (40, False)]
    arrivals, expected = [], []
    for index, (budget, has_grammar) in enumerate(cases):
        prompt = open_prompts[index * 2]
        more = {"structured_outputs": {"regex": REGEX}} if has_grammar else {}
        arrivals.append(Arrival(prompt, bounded(budget, **more), step=index))
        expected.append(most_likely(llama, spelled, prompt, budget, has_grammar=has_grammar)[:24])
        arrivals.append(Arrival(llama.prompts[index], GREEDY, step=index))
        expected.append(llama.answers[index])
    for _ in range(2):  # Again, with prefix hits.
        outputs = drive(llm_for().engine, arrivals)
        assert [tokens_of(output) for output in outputs] == [[tokens] for tokens in expected]


def test_samples_have_budgets_of_their_own_whatever_is_preempted(llama, llm_for, open_prompts):
    params = bounded(6, n=3, temperature=1.3, seed=8, structured_outputs={"regex": REGEX})
    alone = tokens_of(generate(llm_for(), open_prompts[8], params))
    engine = llm_for().engine
    before = preemptions(engine)
    crowd = [Arrival(llama.prompts[9], GREEDY, priority=-1, tenant=f"t{i}") for i in range(2)]
    mine = Arrival(open_prompts[8], params)
    outputs = drive(engine, [*crowd, mine, Arrival(llama.prompts[9], GREEDY)])
    assert preemptions(engine) > before
    assert tokens_of(outputs[2]) == alone
    assert len({tuple(tokens) for tokens in alone}) == 3
    for completion in outputs[2].outputs:
        _, closed, content = completion.text.partition(CLOSE.decode())
        assert (
            closed and WORDS.goes_on(content.encode()[:-1]) and completion.finish_reason == "stop"
        )


def test_an_answer_without_reasoning_has_no_budget(llama, llm_for):
    (plain,) = drive(llm_for().engine, [Arrival(llama.prompts[3], bounded(0))])
    assert tokens_of(plain) == [llama.answers[3]]


def test_what_cannot_be_bounded_is_refused_by_name(llama, llm_for, tokenizer):
    close = tokenizer.encode(CLOSE.decode(), add_special_tokens=False)
    for name, more in {
        "allowed_token_ids": {"allowed_token_ids": close[1:]},
        "bad_words": {"bad_words": ["k"]},
        "stop_token_ids": {"stop_token_ids": close[:1], "min_tokens": 2},
    }.items():
        with pytest.raises(RequestError, match=f"^{name} .*thinking_token_budget"):
            generate(llm_for(), llama.prompts[3], bounded(3, **more))
    fits = bounded(3, allowed_token_ids=close, stop_token_ids=close[:1])
    assert len(tokens_of(generate(llm_for(), llama.prompts[3], fits))) == 1
    with pytest.raises(RequestError, match="thinking_token_budget must be an integer in -1"):
        bounded(-2)
