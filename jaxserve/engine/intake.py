"""From what a caller gives to a request that can be served, or to the reason why not."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from jaxserve.config import EngineConfig
from jaxserve.engine.agreed_log import Addition
from jaxserve.engine.prompts import Prompt, TokenizedPrompt, tokenize_prompt
from jaxserve.engine.request import Generation, Request
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.shared_prefix import SharedPrefix
from jaxserve.errors import RequestError
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured.grammar import Grammar
from jaxserve.structured.grammars import Grammars
from jaxserve.text import Tokenizer


class NewRequest(NamedTuple):
    """A request, and what only the device needs to know of it: the seed of its sampling, and its
    bad words as token ids."""

    request: Request
    seed: int
    bad_word_ids: list[list[int]]


class Intake:
    """Checks requests, tokenizes them, and gives their sequences ids, seeds and salts."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        clock: Callable[[], int],
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._clock = clock
        self._shares = config.enable_prefix_caching
        self._grammars = Grammars(tokenizer, vocab_size, eos_token_ids)
        self._seeds = random.Random(config.seed)
        self._seq_ids = itertools.count()
        self._salts = itertools.count()

    def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """A prompt's token ids. Raises RequestError for a bad prompt."""
        return tokenize_prompt(prompt, self._tokenizer, self._vocab_size)

    def grammar(self, params: SamplingParams) -> Future[Grammar] | None:
        """The grammar of `params.structured_outputs`, if it has one, as `Grammars.submit` has it.
        For any thread."""
        _check_params(params)
        wanted = params.structured_outputs
        return None if wanted is None else self._grammars.submit(wanted)

    def make(
        self,
        request_id: str,
        prompt: Prompt | TokenizedPrompt,
        params: SamplingParams,
        priority: int | None,
        tenant: str | None,
        shared_prefix: SharedPrefix | None,
        grammar: Grammar | None,
        cache_salt: str | None,
    ) -> NewRequest:
        """A request with its sequences, whose output is of a `grammar`, if one is wanted. Raises
        RequestError for anything wrong with it."""
        _check_params(params)
        if priority is not None:
            check_priority(priority)
        for name, text in (("tenant", tenant), ("cache_salt", cache_salt)):
            if text is not None and (not isinstance(text, str) or not text):
                raise RequestError(f"{name} is {text!r}; it must be a text that is not empty.")
        params.check_vocabulary(self._vocab_size)
        if not isinstance(prompt, TokenizedPrompt):
            prompt = self.tokenize(prompt)
        words = self._bad_word_ids(params)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        prefixes = () if shared_prefix is None else (shared_prefix,)
        if params.n > 1:
            prefixes += (SharedPrefix(len(prompt.token_ids)),)
        salt, arrival_us = self._salt(tenant, cache_salt), self._clock()
        sequences = [
            Sequence(
                seq_id=next(self._seq_ids),
                request_id=request_id,
                index=index,
                prompt_token_ids=prompt.token_ids,
                params=params,
                arrival_us=arrival_us,
                priority=params.priority if priority is None else priority,
                tenant=tenant,
                cache_salt=cache_salt,
                salt=salt,
                prefixes=prefixes,
            )
            for index in range(params.n)
        ]
        generations = [
            Generation(
                seq,
                self._tokenizer,
                self._eos,
                grammar and grammar.matcher(ignore_eos=params.ignore_eos),
            )
            for seq in sequences
        ]
        return NewRequest(
            Request(
                request_id, prompt.text, prompt.token_ids, params, generations, self._tokenizer
            ),
            seed,
            words,
        )

    def make_again(self, added: Addition, shared_prefix: SharedPrefix | None) -> NewRequest:
        """A request that host 0 has accepted, with the numbers and the seed that it has there."""
        self._seq_ids = itertools.count(added.first_seq_id)
        prompt = TokenizedPrompt(added.prompt, added.token_ids)
        wanted = added.params.structured_outputs
        new = self.make(
            added.request_id,
            prompt,
            added.params,
            added.priority,
            added.tenant,
            shared_prefix,
            wanted and self._grammars.get(wanted),
            added.cache_salt,
        )
        return new._replace(seed=added.seed)

    def make_anew(self, added: Addition, shared_prefix: SharedPrefix | None) -> NewRequest:
        """A request that another engine has accepted, with the seed that it has there."""
        added = dataclasses.replace(added, first_seq_id=next(self._seq_ids))
        return self.make_again(added, shared_prefix)

    def _salt(self, tenant: str | None, cache_salt: str | None) -> bytes:
        """Requests of other tenants, or with other salts, share no pages; without a prefix cache
        only sequences of one request do."""
        parts = [tenant, cache_salt]
        salt = b"" if parts == [None, None] else json.dumps(parts).encode()
        return salt if self._shares else salt + b"\0%d" % next(self._salts)

    def _bad_word_ids(self, params: SamplingParams) -> list[list[int]]:
        """Token sequences of the bad words, each at the start of a text and after a space."""
        words = []
        for word in params.bad_words:
            for spelling in (word.lstrip(), " " + word.lstrip()):
                token_ids = self._tokenizer.encode(spelling, add_special_tokens=False)
                if token_ids and token_ids not in words:
                    words.append(token_ids)
        return words


def _check_params(params: SamplingParams) -> None:
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params is {params!r:.80}; it must be a SamplingParams.")


def check_priority(priority: int) -> None:
    """Raises RequestError unless it is an integer."""
    if type(priority) is not int:
        raise RequestError(f"priority is {priority!r}; it must be an integer, lower runs first.")
