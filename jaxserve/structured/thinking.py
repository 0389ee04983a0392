"""Bounds a sequence's reasoning: at the budget, the tokens that end it are forced."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import numpy as np

from jaxserve.core.errors import RequestError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.structured.bitmask import WORD_BITS, has_token, mask_words, packed
from jaxserve.structured.matcher import Matcher
from jaxserve.text import Tokenizer
from jaxserve.text.thinking import CLOSE, OPEN, begun_thinking, has_channels

_OPEN, _CLOSE = OPEN.encode(), CLOSE.encode()


class ThinkingMarks:
    """How a model spells the tags around its reasoning. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.words = mask_words(vocab_size)
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._clean: dict[int, np.ndarray] = {}

    @functools.cached_property
    def open_ids(self) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(OPEN, add_special_tokens=False))

    @functools.cached_property
    def close_ids(self) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(CLOSE, add_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def begins_open(self, prompt_token_ids: Sequence[int]) -> bool:
        """Whether the reasoning begins in the prompt."""
        return begun_thinking(self._tokenizer, prompt_token_ids) is not None

    def mask(self, *token_ids: int) -> np.ndarray:
        """The mask int32 [words] of these tokens."""
        bits = np.zeros(self.words * WORD_BITS, np.bool_)
        bits[list(token_ids)] = True
        return packed(bits)

    @functools.cached_property
    def any_token(self) -> np.ndarray:
        """The mask of all tokens."""
        return np.full(self.words, -1, np.int32)

    def ends_cleanly(self, begun: int) -> np.ndarray:
        """The mask without tokens that are the rest of the closing tag, of which `begun` bytes are
        there, with other text than space after it: that text would be before the answer's first
        token, unseen by its grammar."""
        if begun not in self._clean:
            rest = _CLOSE[begun:]
            spelled = (self.token_bytes(token_id) for token_id in range(self._vocab_size))
            others = (
                token_id
                for token_id, text in enumerate(spelled)
                if text.startswith(rest) and text[len(rest) :].strip()
            )
            self._clean[begun] = ~self.mask(*others)
        return self._clean[begun]

    def check(self, params: SamplingParams, bad_word_ids: Sequence[Sequence[int]]) -> None:
        """Raises RequestError if the end of the reasoning could not be sampled."""
        if has_channels(self._tokenizer.chat_template):
            raise RequestError(
                f"thinking_token_budget needs a model that ends its reasoning by {CLOSE}, and this "
                "one writes it to a channel; leave it out."
            )
        for tag, token_ids in ((OPEN, self.open_ids), (CLOSE, self.close_ids)):
            known = (token for token in token_ids if token < self._vocab_size)
            if tag.encode() not in b"".join(map(self.token_bytes, known)):
                raise RequestError(
                    f"thinking_token_budget needs a model whose tokens can spell {tag}; leave it "
                    "out."
                )
        ends, spelled = set(self.close_ids), f"{CLOSE}, which is {list(self.close_ids)}"
        if params.allowed_token_ids is not None and ends - set(params.allowed_token_ids):
            raise RequestError(
                "allowed_token_ids lacks tokens that end the reasoning at thinking_token_budget "
                f"({spelled}); add them."
            )
        if any(word[-1] in ends for word in bad_word_ids):
            raise RequestError(
                "bad_words forbids tokens that end the reasoning at thinking_token_budget "
                f"({spelled}); leave those words out."
            )
        if params.min_tokens and ends & set(params.stop_token_ids):
            raise RequestError(
                "stop_token_ids has tokens that end the reasoning at thinking_token_budget "
                f"({spelled}), and min_tokens forbids them at first; leave out either."
            )


class ThinkingMatcher:
    """The state of one sequence whose reasoning is bounded, and whose answer may have a grammar.

    Reasoning is what the protocol's readers take for it: from the tag that ends the prompt, or
    begins the output, to the closing tag. `budget` counts the tokens between these tags, the first
    of which may complete the closing tag by itself; negative: no limit. With a grammar, no token
    that ends the text comes before the answer.
    """

    def __init__(
        self,
        marks: ThinkingMarks,
        budget: int,
        grammar: Matcher | None,
        begins_open: bool,
    ) -> None:
        """`grammar`: of the answer, in its initial state."""
        self._marks = marks
        self._budget = budget
        self._grammar = grammar
        self._num_tokens = 0
        self._used = 0
        self._forced: tuple[int, ...] = ()
        self._answer: int | None = None
        """Place of the first token of the answer, once it is known."""
        self._tail = b""
        """The last bytes: of a closing tag, or before the reasoning, all."""
        self._thinking = False
        if begins_open:
            self._think()

    @property
    def num_tokens(self) -> int:
        """Tokens consumed so far."""
        if self._answer is not None and self._grammar is not None:
            return self._answer + self._grammar.num_tokens
        return self._num_tokens

    @property
    def mask(self) -> np.ndarray:
        """int32 [words] with a bit set for each token allowed next."""
        if self._forced:
            return self._marks.mask(self._forced[0])
        if self._grammar is None:
            return self._marks.any_token
        if self._answer is not None:
            return self._grammar.mask
        if not self._thinking:
            return self._grammar.mask | self._marks.mask(self._marks.open_ids[0])
        begun = _begun(self._tail)
        text_mask = self._grammar.text_mask
        return text_mask & self._marks.ends_cleanly(begun) if begun else text_mask

    def waits_for(self, position: int) -> bool:
        """Whether the mask at a position of the output depends on tokens not yet consumed."""
        ahead = position - self.num_tokens
        if ahead <= 0:
            return False
        if self._forced or self._grammar is not None:
            return True
        return self._answer is None and 0 <= self._budget <= self._used + ahead

    def complete(self, num_tokens: int) -> bool:
        """As of `Matcher`."""
        grammar = self._answering()
        return grammar is not None and grammar.complete(num_tokens - self._answer)

    def error(self, num_tokens: int) -> str | None:
        """As of `Matcher`."""
        grammar = self._answering()
        return None if grammar is None else grammar.error(num_tokens - self._answer)

    def take(self, position: int, token_id: int) -> Matcher | None:
        """As of `Matcher`."""
        grammar = self._answering()
        if grammar is not None:
            return grammar.take(position - self._answer, token_id)
        if position != self._num_tokens:
            return None
        if self._begins_answer(token_id):
            self._answer = position
            return self._grammar.take(0, token_id)
        self._num_tokens += 1
        if self._answer is None:
            self._advance(token_id)
        return None

    def forced(self, most: int) -> tuple[int, ...]:
        """As of `Matcher`."""
        grammar = self._answering()
        return self._forced[:most] if grammar is None else grammar.forced(most)

    def copy(self) -> ThinkingMatcher:
        """As of `Matcher`."""
        other = copy.copy(self)
        other._grammar = self._grammar and self._grammar.copy()
        return other

    def _answering(self) -> Matcher | None:
        """The grammar, once the answer has begun."""
        return None if self._answer is None else self._grammar

    def _begins_answer(self, token_id: int) -> bool:
        """Whether an answer with a grammar begins with this token, without any reasoning."""
        if self._grammar is None or self._thinking or self._forced:
            return False
        return token_id != self._marks.open_ids[0] or has_token(self._grammar.mask, token_id)

    def _advance(self, token_id: int) -> None:
        text = self._marks.token_bytes(token_id)
        if self._forced and token_id == self._forced[0]:
            self._forced = self._forced[1:]
        if not self._thinking:
            self._open(token_id, text)
            return
        self._used += 1
        seen = self._tail + text
        if _CLOSE in seen:
            self._forced, self._answer = (), self._num_tokens
            return
        self._tail = seen[-len(_CLOSE) :]
        self._bound()

    def _open(self, token_id: int, text: bytes) -> None:
        """Before any reasoning: waits for its tag, or for other text, which is the answer's."""
        if self._grammar is not None and not self._tail:
            self._forced = self._marks.open_ids[1:]
        self._tail += text
        begin = self._tail.lstrip()
        if begin.startswith(_OPEN):
            self._think()
        elif not _OPEN.startswith(begin):
            self._answer = self._num_tokens

    def _think(self) -> None:
        self._thinking, self._tail, self._forced = True, b"", ()
        self._bound()

    def _bound(self) -> None:
        """Forces the end of the reasoning once the budget is used."""
        if not self._forced and 0 <= self._budget <= self._used:
            self._forced = self._marks.close_ids


def _begun(tail: bytes) -> int:
    """Bytes of the closing tag at the end of the text."""
    lengths = range(len(_CLOSE) - 1, 0, -1)
    return next((length for length in lengths if tail.endswith(_CLOSE[:length])), 0)
