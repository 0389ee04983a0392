"""Validates and tokenizes a caller's input, and builds requests."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Callable, Collection
from concurrent.futures import Future

from jaxserve.core.commands import AddRequest
from jaxserve.core.errors import RequestError
from jaxserve.core.requests.lora import LoadedAdapter, LoRARequest
from jaxserve.core.requests.pooling import PoolingParams
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence, SharedPrefix
from jaxserve.core.settings.config import EngineConfig
from jaxserve.engine.prompts import Prompt, TokenizedPrompt, tokenize_prompt
from jaxserve.engine.request import Request, SequenceOutput
from jaxserve.structured.grammar import Grammar
from jaxserve.structured.grammars import Grammars
from jaxserve.structured.matcher import TokenMatcher
from jaxserve.structured.thinking import ThinkingMarks, ThinkingMatcher
from jaxserve.text import Tokenizer


def prefix_salt(
    tenant: str | None, cache_salt: str | None, adapter: LoadedAdapter | None = None
) -> bytes:
    """Requests with different tenants, salts or adapters share no pages."""
    parts = [tenant, cache_salt, *([adapter.digest] if adapter else [])]
    return b"" if parts == [None, None] else json.dumps(parts).encode()


class InputProcessor:
    """Validates and tokenizes requests, and assigns sequence ids, seeds and salts."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        clock: Callable[[], int],
        processors: Collection[str] = (),
        hidden_size: int = 0,
        load_adapter: Callable[[LoRARequest], LoadedAdapter] | None = None,
    ) -> None:
        """`tokenizer`: None to accept tokenized prompts only, without bad words, and to output no
        text. `processors` are the names of the engine's logits processors. `hidden_size`: of hidden
        states to pool; 0 if there are none. `load_adapter`: loads the adapter of a request unless
        it is loaded; None if there are no adapters."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._clock = clock
        self._shares = config.enable_prefix_caching
        self._processors = processors
        self._hidden_size = hidden_size
        self._load_adapter = load_adapter
        self._grammars = Grammars(tokenizer, vocab_size, eos_token_ids)
        self._marks = None if tokenizer is None else ThinkingMarks(tokenizer, vocab_size)
        self._seeds = random.Random(config.seed)
        self._next_seq_id = 0
        self._salts = itertools.count()

    def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """A prompt's token ids. Raises RequestError for a bad prompt."""
        return tokenize_prompt(prompt, self._tokenizer, self._vocab_size)

    def grammar(self, params: SamplingParams | PoolingParams) -> Future[Grammar] | None:
        """The grammar of `params.structured_outputs`, if set, from `Grammars.submit`.
        Thread-safe."""
        check_params(params)
        if isinstance(params, PoolingParams):
            return None
        wanted = params.structured_outputs
        return None if wanted is None else self._grammars.submit(wanted)

    def process(
        self,
        request_id: str,
        prompt: Prompt | TokenizedPrompt,
        params: SamplingParams | PoolingParams,
        priority: int | None,
        tenant: str | None,
        shared_prefix: SharedPrefix | None,
        cache_salt: str | None,
        lora_request: LoRARequest | None = None,
    ) -> AddRequest:
        """Validates and tokenizes a request. Raises RequestError if it is invalid."""
        check_params(params)
        if priority is not None:
            check_priority(priority)
        for name, text in (("tenant", tenant), ("cache_salt", cache_salt)):
            if text is not None and (not isinstance(text, str) or not text):
                raise RequestError(f"{name} is {text!r}; it must be a non-empty string.")
        pooling = None
        if isinstance(params, PoolingParams):
            params.check_size(self._hidden_size)
            pooling, params = params, params.sampling
            priority = pooling.priority if priority is None else priority
        params.check_vocabulary(self._vocab_size)
        self._check_processors(params)
        self._check_thinking(params)
        if not isinstance(prompt, TokenizedPrompt):
            prompt = self.tokenize(prompt)
        return AddRequest(
            request_id=request_id,
            prompt=prompt.text,
            token_ids=prompt.token_ids,
            params=params,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            seed=self._seed(params),
            first_seq_id=self._next_seq_id,
            pooling=pooling,
            lora_request=lora_request,
            shared_prefix=shared_prefix,
            arrival_us=self._clock(),
        )

    def build(self, added: AddRequest, grammar: Grammar | None = None) -> Request:
        """A request with its sequences. The grammar is compiled unless given or cached, and the
        adapter is loaded."""
        params = added.params
        if grammar is None and params.structured_outputs is not None:
            grammar = self._grammars.get(params.structured_outputs)
        prefixes = () if added.shared_prefix is None else (added.shared_prefix,)
        if params.n > 1:
            prefixes += (SharedPrefix(len(added.token_ids)),)
        adapter = None
        if added.lora_request is not None and self._load_adapter is not None:
            adapter = self._load_adapter(added.lora_request)
        salt = self.salt(added.tenant, added.cache_salt, adapter)
        self._next_seq_id = added.first_seq_id + params.n
        sequences = [
            Sequence(
                seq_id=added.first_seq_id + index,
                request_id=added.request_id,
                index=index,
                prompt_token_ids=added.token_ids,
                params=params,
                arrival_us=added.arrival_us,
                priority=params.priority if added.priority is None else added.priority,
                tenant=added.tenant,
                cache_salt=added.cache_salt,
                salt=salt,
                prefixes=prefixes,
                pooling=added.pooling,
                adapter=adapter,
            )
            for index in range(params.n)
        ]
        sequence_outputs = [
            SequenceOutput(
                seq,
                self._tokenizer,
                self._eos,
                self._matcher(added, grammar),
            )
            for seq in sequences
        ]
        return Request(
            added.request_id,
            added.prompt,
            added.token_ids,
            params,
            sequence_outputs,
            self._tokenizer,
            added.seed,
            self._bad_word_ids(params),
        )

    def _matcher(self, added: AddRequest, grammar: Grammar | None) -> TokenMatcher | None:
        """What constrains the tokens of one sequence."""
        params = added.params
        answer = grammar and grammar.matcher(ignore_eos=params.ignore_eos)
        if params.thinking_token_budget is None or not params.masked:
            return answer
        begins_open = self._marks.begins_open(added.token_ids)
        return ThinkingMatcher(self._marks, params.thinking_token_budget, answer, begins_open)

    def rebuild(self, added: AddRequest) -> Request:
        """As `build`, for a request accepted by another engine, with sequence ids of this one.
        Raises RequestError if it needs logits processors that this one lacks."""
        self._check_processors(added.params)
        self.skip_seed(added.params)
        return self.build(dataclasses.replace(added, first_seq_id=self._next_seq_id))

    def skip_seed(self, params: SamplingParams) -> None:
        """Keeps the seeds of later requests equal to those of a host that processed this one."""
        self._seed(params)

    def _seed(self, params: SamplingParams) -> int:
        return self._seeds.getrandbits(63) if params.seed is None else params.seed

    def salt(
        self, tenant: str | None, cache_salt: str | None, adapter: LoadedAdapter | None = None
    ) -> bytes:
        """As `prefix_salt`; without a prefix cache, only sequences of one request share pages."""
        salt = prefix_salt(tenant, cache_salt, adapter)
        return salt if self._shares else salt + b"\0%d" % next(self._salts)

    def _bad_word_ids(self, params: SamplingParams) -> list[list[int]]:
        """Token sequences of each bad word, without and with a leading space."""
        words = []
        for word in params.bad_words:
            for spelling in (word.lstrip(), " " + word.lstrip()):
                token_ids = self._tokenizer.encode(spelling, add_special_tokens=False)
                if token_ids and token_ids not in words:
                    words.append(token_ids)
        return words

    def _check_thinking(self, params: SamplingParams) -> None:
        if params.thinking_token_budget is None:
            return
        if self._marks is None:
            raise RequestError("thinking_token_budget needs a tokenizer, and this engine has none.")
        self._marks.check(params, self._bad_word_ids(params))

    def _check_processors(self, params: SamplingParams) -> None:
        if unknown := sorted(set(params.extra_args or ()) - set(self._processors)):
            raise RequestError(
                f"extra_args names {unknown[0]!r:.80}, which is none of this engine's logits "
                f"processors: {', '.join(self._processors) or 'it has none'}."
            )


def check_params(params: SamplingParams | PoolingParams) -> None:
    """Raises RequestError for anything else."""
    if not isinstance(params, SamplingParams | PoolingParams):
        raise RequestError(f"sampling_params is {params!r:.80}; it must be a SamplingParams.")


def check_priority(priority: int) -> None:
    """Raises RequestError if `priority` is not an integer."""
    if type(priority) is not int:
        raise RequestError(f"priority is {priority!r}; it must be an integer, lower runs first.")
