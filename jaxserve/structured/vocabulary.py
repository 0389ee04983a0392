"""Adapts a tokenizer for llguidance: the bytes of every token, and the end-of-text tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import llguidance
import numpy as np

from jaxserve.core.errors import RequestError
from jaxserve.structured.bitmask import WORD_BITS, mask_words, packed
from jaxserve.text import Tokenizer


class Vocabulary:
    """The tokens that a model can sample, as the vocabulary of grammars."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """`vocab_size` is the model's, which may be larger or smaller than the tokenizer's. Takes
        some tenths of a second.

        Raises RequestError if there is no end-of-text token, as no output could be complete.
        """
        self.words = mask_words(vocab_size)
        self.eos_token_ids = frozenset(token for token in eos_token_ids if token < vocab_size)
        if not self.eos_token_ids:
            raise RequestError(
                "structured_outputs cannot be used with this model: it has no end-of-text token."
            )
        eos = sorted(self.eos_token_ids)
        tokens = _Tokens(tokenizer, vocab_size, eos)
        self.tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(tokens), eos_token=eos)
        tokens.longest_first = self.tokenizer.greedy_tokenize
        text = np.zeros(self.words * WORD_BITS, np.bool_)
        text[:vocab_size] = True
        text[eos] = False
        self.text_mask = packed(text)
        """Mask of all tokens except end-of-text tokens."""


class _Tokens:
    """The tokenizer interface that llguidance requires."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]) -> None:
        """End-of-text tokens count as special, even if they are not special in the tokenizer."""
        special = {token for token in tokenizer.special_token_ids if token < vocab_size}
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(special.union(eos))
        self.eos_token_id = eos[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.longest_first: Callable[[str], list[int]] | None = None
        """Greedy tokenization of any text, set once llguidance has built its tokenizer."""
        self._tokenizer = tokenizer
        self._special = frozenset(self.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        """Tokenizes text that the grammar forces: with the model's tokenizer, as in its training
        data, unless that gives special tokens that the text happens to name, adds a leading space,
        or gives ids outside the model's vocabulary.
        """
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        known = max(token_ids, default=0) < len(self.tokens)
        if known and self._special.isdisjoint(token_ids):
            spelled = b"".join(self.tokens[token] for token in token_ids)
            if spelled == text.encode():
                return token_ids
        return self.longest_first(text)
