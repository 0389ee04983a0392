"""`/v1/completions`: complete prompts given as text or token ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, StrictBool

from jaxserve.core.requests.lora import LoRARequest
from jaxserve.core.requests.outputs import CompletionOutput, Delta, RequestOutput
from jaxserve.core.requests.sampling_params import MAX_N, SamplingParams
from jaxserve.engine.beam_search import BeamSearchParams
from jaxserve.engine.prompts import TokenizedPrompt
from jaxserve.protocol.errors import ErrorReply, FieldError
from jaxserve.protocol.field_types import Integer, only
from jaxserve.protocol.fields import GenerationFields
from jaxserve.protocol.logprobs import (
    TextOffsets,
    completion_logprobs,
    prompt_logprobs,
    token_names,
)
from jaxserve.protocol.model import Model
from jaxserve.protocol.parsing.reasoning import check_budget, reasoning_marks
from jaxserve.protocol.prompts import Prompts, tokenized
from jaxserve.protocol.usage import StreamUsage, usage
from jaxserve.text.detokenizer import Detokenizer


class CompletionRequest(GenerationFields):
    """The request body: OpenAI's fields, and vLLM's extensions."""

    remedies: ClassVar[Mapping[str, str]] = {
        "max_completion_tokens": "use max_tokens",
        "max_output_tokens": "use max_tokens",
    }

    prompt: Prompts = Field(
        description="Text or token ids, or a list of either.", examples=["The sky is"]
    )
    best_of: Integer | None = Field(
        None,
        description="Sequences to sample, of which the n with the highest mean log probability of "
        "a token are returned.",
    )
    echo: StrictBool | None = None
    logprobs: Integer | None = None
    suffix: Annotated[None, only(remedy="leave it out: no model here fills gaps")] = Field(
        None, description="Not supported."
    )

    def prompts(self, model: Model) -> tuple[TokenizedPrompt, ...]:
        """Raises RequestError for no prompts, too many, or an invalid one."""
        truncates = self.truncate_prompt_tokens is not None
        return tuple(tokenized(model, "prompt", self.prompt, self.add_special_tokens, truncates))

    def parse(self, model: Model) -> ParsedCompletion:
        """Convert the body to a request for the engine. Raises RequestError."""
        model = self.check(model)
        logprobs = self._logprobs
        if self.echo and logprobs is not None and self.stream:
            name = "logprob_token_ids" if self.logprobs is None else "logprobs"
            raise FieldError(name, "of an echoed prompt cannot be streamed; set stream to false.")
        more: dict[str, Any] = {"logprobs": logprobs} | self._sampled_for_best()
        if self.echo and logprobs is not None:
            if self.logprobs is not None and self.prompt_logprobs not in (None, logprobs):
                raise FieldError("prompt_logprobs", "must equal logprobs, since echo is true.")
            if self.prompt_logprobs is None:
                more["prompt_logprobs"] = logprobs
        scores_only = self.max_tokens == 0
        if scores_only:
            if self.logprob_token_ids is not None:
                raise FieldError("logprob_token_ids", "needs generated tokens; raise max_tokens.")
            if not self.echo:
                raise FieldError("max_tokens", "is 0, which needs echo; set echo to true.")
            more["max_tokens"] = 1  # The engine samples one token, which is dropped.
        params = self.sampling(model, {}, **more)
        if params.thinking_token_budget is not None:
            check_budget(reasoning_marks(model.chat.reasoning_parser, model.chat_template(False)))
        beam = self.beam_search(params)
        if beam is not None:
            self._check_beam_search(params, scores_only)
        return ParsedCompletion(
            model=model,
            prompts=tuple(self.truncated(each, model, params) for each in self.prompts(model)),
            params=params,
            beam=beam,
            cache_salt=self.cache_salt or None,
            stream=bool(self.stream),
            include_usage=self.include_usage,
            continuous_usage=self.continuous_usage,
            echo=bool(self.echo),
            scores_only=scores_only,
            prompt_logprobs=self.prompt_logprobs is not None,
            token_ids=bool(self.return_token_ids),
            tokens_as_ids=bool(self.return_tokens_as_token_ids),
            logprobs=logprobs is not None,
            n=self.n or 1,
            names=self.names,
        )

    @property
    def _logprobs(self) -> int | None:
        """`logprobs`, which `logprob_token_ids` ask for too."""
        if self.logprobs is None and self.logprob_token_ids:
            return 0
        return self.logprobs

    @property
    def names(self) -> dict[str, str]:
        names = super().names
        if self.best_of not in (None, self.n or 1):
            names["n"] = "best_of"
        return names

    def _check_beam_search(self, params: SamplingParams, scores_only: bool) -> None:
        """Raises FieldError for what completions have and beam search lacks."""
        if self.best_of is not None:
            raise FieldError("best_of", "is not supported by beam search; leave it out.")
        if scores_only:
            raise FieldError("max_tokens", "is 0, and beam search needs at least 1.")
        if params.prompt_logprobs is not None:
            raise FieldError("echo", "with logprobs is not supported by beam search.")

    def _sampled_for_best(self) -> dict[str, Any]:
        """The sampling parameters that `best_of` sets. Raises FieldError."""
        best_of, n = self.best_of, self.n or 1
        if best_of is None or best_of == n:
            return {}
        if not n < best_of <= MAX_N:
            raise FieldError("best_of", f"is {best_of}; it must be n or more, at most {MAX_N}.")
        if self.stream:
            raise FieldError("best_of", "above n cannot be streamed; set stream to false.")
        return {"n": best_of, "logprobs": self.logprobs or 0}


@dataclasses.dataclass(frozen=True)
class ParsedCompletion:
    """A request of one or more prompts; choice p * n + i is sequence i of prompt p, or its i-th
    best one if `params` sample more than `n`.

    `scores_only` drops the generated token, for max_tokens 0. `logprobs` and `prompt_logprobs` are
    whether the response has them, `tokens_as_ids` how they name tokens.
    """

    model: Model
    prompts: tuple[TokenizedPrompt, ...]
    params: SamplingParams
    beam: BeamSearchParams | None
    cache_salt: str | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool
    scores_only: bool
    prompt_logprobs: bool
    token_ids: bool
    tokens_as_ids: bool
    logprobs: bool
    n: int
    names: Mapping[str, str]
    ignored_tools: ClassVar[str | None] = None
    named_events: ClassVar[bool] = False

    @property
    def lora_request(self) -> LoRARequest | None:
        return self.model.lora_request

    def response(
        self, outputs: Sequence[RequestOutput], request_id: str, created: int
    ) -> dict[str, Any]:
        """The response body, from each prompt's output."""
        return {
            **self.head(request_id, created),
            "choices": [
                self._choice(number, index, output, choice)
                for number, output in enumerate(outputs)
                for index, choice in enumerate(self._best(output.outputs))
            ],
            "usage": usage(outputs, dropped=self.scores_only),
        }

    def chunks(self, request_id: str, created: int) -> CompletionChunks:
        """The response in streamed chunks."""
        return CompletionChunks(self, self.head(request_id, created))

    def head(self, request_id: str, created: int) -> dict[str, Any]:
        return {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": created,
            "model": self.model.name,
            "system_fingerprint": self.model.system_fingerprint,
        }

    def echoed(self, number: int) -> str:
        """The text of a prompt, with the special tokens that the client gave."""
        prompt = self.prompts[number]
        return self._decoded(prompt.token_ids) if prompt.text is None else prompt.text

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return self.model.tokenizer.decode(token_ids, skip_special_tokens=False)

    def offsets(self, number: int) -> TextOffsets:
        """Text offsets of tokens generated after a prompt, which is counted if echoed."""
        detokenizer = Detokenizer(
            self.model.tokenizer,
            prompt_token_ids=self.prompts[number].token_ids,
            skip_special_tokens=self.params.skip_special_tokens,
        )
        return TextOffsets(detokenizer, len(self.echoed(number)) if self.echo else 0)

    def _prompt_offsets(self, number: int) -> list[int]:
        """Text offsets of an echoed prompt's tokens; 0 for those that the tokenizer added before
        its text."""
        token_ids = self.prompts[number].token_ids
        detokenizer = Detokenizer(self.model.tokenizer, skip_special_tokens=False)
        added = len(self._decoded(token_ids)) - len(self.echoed(number))
        offsets = TextOffsets(detokenizer, begin=min(0, -added)).of(token_ids)
        return [max(0, offset) for offset in offsets]

    def _best(self, choices: Sequence[CompletionOutput]) -> Sequence[CompletionOutput]:
        if len(choices) == self.n:
            return choices
        return sorted(choices, key=_mean_logprob, reverse=True)[: self.n]

    def _choice(
        self, number: int, index: int, output: RequestOutput, choice: CompletionOutput
    ) -> dict[str, Any]:
        text, token_ids, entries = choice.text, list(choice.token_ids), choice.logprobs or []
        if self.scores_only:
            text, token_ids, entries = "", [], []
        answer: dict[str, Any] = {
            "index": number * self.n + index,
            "text": (self.echoed(number) if self.echo else "") + text,
            "logprobs": None,
            "finish_reason": "length" if self.scores_only else choice.finish_reason,
            "stop_reason": None if self.scores_only else choice.stop_reason,
            "prompt_logprobs": None,
            "token_ids": None,
            "prompt_token_ids": None,
        }
        if self.logprobs:
            scored, tokenizer = token_ids, self.model.tokenizer
            offsets = self.offsets(number).of(token_ids)
            if self.echo:
                scored = [*output.prompt_token_ids, *token_ids]
                entries = [*output.prompt_logprobs, *entries]
                offsets = [*self._prompt_offsets(number), *offsets]
            name = token_names(tokenizer, self.tokens_as_ids)
            answer["logprobs"] = completion_logprobs(scored, entries, name, offsets)
        if self.prompt_logprobs:
            answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self.token_ids:
            answer["token_ids"] = token_ids
            answer["weights"] = [run._asdict() for run in choice.weights]
            answer["prompt_token_ids"] = list(output.prompt_token_ids)
        return answer


def _mean_logprob(choice: CompletionOutput) -> float:
    return (choice.cumulative_logprob or 0.0) / max(1, len(choice.token_ids))


class CompletionChunks:
    """Chunks of a streamed completion. Echoed prompts come first."""

    def __init__(self, parsed: ParsedCompletion, head: dict[str, Any]) -> None:
        self._parsed = parsed
        self._head = head
        self._usage = StreamUsage(
            parsed.prompts,
            parsed.include_usage,
            parsed.continuous_usage,
            dropped=parsed.scores_only,
        )
        self._offsets: dict[int, TextOffsets] = {}

    def begin(self) -> Iterator[dict[str, Any]]:
        parsed = self._parsed
        if not parsed.echo and not parsed.token_ids:
            return
        for number, prompt in enumerate(parsed.prompts):
            for index in range(number * parsed.params.n, (number + 1) * parsed.params.n):
                choice = self._choice(index, parsed.echoed(number) if parsed.echo else "")
                if parsed.token_ids:
                    choice |= {"token_ids": [], "prompt_token_ids": list(prompt.token_ids)}
                yield self._chunk(choice)

    def add(self, number: int, deltas: Sequence[Delta]) -> Iterator[dict[str, Any]]:
        """Chunks for new deltas of prompt `number`."""
        parsed = self._parsed
        for delta in deltas:
            self._usage.count(delta)
            index = number * parsed.params.n + delta.index
            choice = self._choice(index, delta.text)
            choice["finish_reason"], choice["stop_reason"] = delta.finish_reason, delta.stop_reason
            token_ids, entries = delta.token_ids, delta.logprobs
            if parsed.scores_only:
                choice["text"], token_ids, entries = "", (), None
            if entries:
                if index not in self._offsets:
                    self._offsets[index] = parsed.offsets(number)
                offsets = self._offsets[index].of(token_ids)
                name = token_names(parsed.model.tokenizer, parsed.tokens_as_ids)
                choice["logprobs"] = completion_logprobs(token_ids, entries, name, offsets)
            if parsed.token_ids:
                choice["token_ids"] = list(token_ids)
            if choice["text"] or entries or delta.finish_reason or (parsed.token_ids and token_ids):
                yield self._chunk(choice)

    def end(self, outputs: Sequence[RequestOutput]) -> Iterator[dict[str, Any]]:
        """The final chunks, once every prompt has its output."""
        if self._parsed.include_usage:
            counted = usage(outputs, dropped=self._parsed.scores_only)
            yield {**self._head, "choices": [], "usage": counted}

    def failed(self, reply: ErrorReply) -> Iterator[dict[str, Any]]:
        """The event of an error after the beginning."""
        yield reply.body

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, **self._usage.of_chunk, "choices": [choice]}

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
