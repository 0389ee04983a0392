"""The response to a chat request: whole, or streamed in chunks."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from jaxserve.core.requests.lora import LoRARequest
from jaxserve.core.requests.outputs import CompletionOutput, Delta, RequestOutput
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.engine.beam_search import BeamSearchParams
from jaxserve.engine.prompts import TokenizedPrompt
from jaxserve.protocol.errors import ErrorReply, name_by
from jaxserve.protocol.logprobs import chat_logprobs, prompt_logprobs, token_names
from jaxserve.protocol.model import Model
from jaxserve.protocol.parsing.answer import Answer, AnswerReader
from jaxserve.protocol.parsing.channels import ChannelReader
from jaxserve.protocol.parsing.reasoning import Marks, ReasoningReader, num_reasoning_tokens
from jaxserve.protocol.parsing.tool_calls import Format, Piece, ToolReader
from jaxserve.protocol.tools import Tool
from jaxserve.protocol.usage import StreamUsage, usage
from jaxserve.text.thinking import OPEN


@dataclasses.dataclass(frozen=True)
class ToolUse:
    """The tools that may be called, and how calls are parsed from text.

    `schema` constrains the output when a call is forced.
    """

    tools: tuple[Tool, ...]
    how: Format | Literal["named", "required"]
    parallel: bool
    schema: dict[str, Any] | None = None

    def reader(self) -> ToolReader:
        return ToolReader(self.tools, self.how, self.parallel)


@dataclasses.dataclass(frozen=True)
class ParsedChat:
    """A chat request, with one prompt; choice i is its sequence i.

    `has_reasoning`: whether answers have this field, null where the model writes none. `reasons`:
    how outputs mark it, None if they do not, as in a format; `begun_reasoning` is what the prompt
    ends with of it, None unless outputs begin within. `tokens_as_ids` is of logprobs. `echoed` is
    text that each answer begins with. `ignored_tools` and `names` are as in
    `endpoints.ParsedRequest`.
    """

    model: Model
    prompts: tuple[TokenizedPrompt, ...]
    params: SamplingParams
    beam: BeamSearchParams | None
    cache_salt: str | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    tool_use: ToolUse | None
    has_reasoning: bool
    reasons: Marks | None
    begun_reasoning: str | None
    include_reasoning: bool
    prompt_logprobs: bool
    token_ids: bool
    tokens_as_ids: bool
    echoed: str
    ignored_tools: str | None
    names: Mapping[str, str]
    named_events: ClassVar[bool] = False

    @property
    def lora_request(self) -> LoRARequest | None:
        return self.model.lora_request

    def with_names(self, names: Mapping[str, str]) -> ParsedChat:
        """This request of another API, in which fields of chats have other `names`."""
        own = {name: name_by(names, other) for name, other in self.names.items()}
        return dataclasses.replace(self, names={**names, **own})

    def response(
        self, outputs: Sequence[RequestOutput], request_id: str, created: int
    ) -> dict[str, Any]:
        """The response body, from the single output."""
        (output,) = outputs
        body = {
            **self.head(request_id, created, "chat.completion"),
            "service_tier": None,
            "choices": [self._choice(choice, request_id) for choice in output.outputs],
            "usage": self.usage(outputs),
            "prompt_logprobs": None,
            "prompt_token_ids": None,
        }
        if self.prompt_logprobs:
            body["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self.token_ids:
            body["prompt_token_ids"] = list(output.prompt_token_ids)
        return body

    def chunks(self, request_id: str, created: int) -> ChatChunks:
        """The response in streamed chunks."""
        return ChatChunks(self, request_id, created)

    def head(self, request_id: str, created: int, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{request_id}",
            "object": kind,
            "created": created,
            "model": self.model.name,
            "system_fingerprint": self.model.system_fingerprint,
        }

    def reader(self) -> AnswerReader:
        """A reader of one choice."""
        if self.reasons == "channels":
            return AnswerReader(self._channels(), None)
        return AnswerReader(
            ReasoningReader(self.begun_reasoning) if self.reasons else None,
            None if self.tool_use is None else self.tool_use.reader(),
        )

    def _channels(self) -> ChannelReader:
        tools = self.tool_use.tools if self.tool_use else ()
        return ChannelReader({tool.function.name for tool in tools})

    def usage(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """OpenAI's `usage`, with the reasoning's part where the model marks it."""
        counted = usage(outputs)
        if self.reasons:
            choices = [choice for output in outputs for choice in output.outputs]
            tokenizer, is_open = self.model.tokenizer, self.begun_reasoning is not None
            reasoned = sum(
                num_reasoning_tokens(tokenizer, each.text, each.token_ids, self.reasons, is_open)
                for each in choices
            )
            counted["completion_tokens_details"] = {"reasoning_tokens": reasoned}
        return counted

    def scores(self, source: CompletionOutput | Delta) -> dict[str, Any] | None:
        """Log probabilities of the generated tokens, if requested."""
        if self.params.logprobs is None or source.logprobs is None:
            return None
        tokenizer = self.model.tokenizer
        return chat_logprobs(
            source.token_ids,
            source.logprobs,
            None if self.params.logprob_token_ids else self.params.logprobs,
            tokenizer,
            token_names(tokenizer, self.tokens_as_ids),
        )

    @property
    def echo(self) -> tuple[str, str]:
        """The content and the reasoning that each answer begins with."""
        if not self.reasons or self.begun_reasoning is None:
            return self.echoed, ""
        before, tag, reasoning = self.echoed.rpartition(OPEN)
        return (before, reasoning.lstrip()) if tag else (self.echoed, "")

    def _choice(self, choice: CompletionOutput, request_id: str) -> dict[str, Any]:
        answer = Answer.of(self.reader(), choice.text)
        echoed, reasoning = self.echo
        content = echoed + answer.content
        message: dict[str, Any] = {"role": "assistant", "content": content}
        message |= {"refusal": None, "annotations": [], "audio": None, "function_call": None}
        if self.has_reasoning and self.include_reasoning:
            message |= in_both_names(reasoning + answer.reasoning or None)
        if answer.calls:
            message["content"] = content.strip() or None
            message["tool_calls"] = [
                call.body(call_id(request_id, choice.index, number))
                for number, call in enumerate(answer.calls)
            ]
        body = {
            "index": choice.index,
            "message": message,
            "logprobs": self.scores(choice),
            "finish_reason": finish_reason(choice.finish_reason, bool(answer.calls)),
            "stop_reason": choice.stop_reason,
            "token_ids": None,
        }
        if self.token_ids:
            body["token_ids"] = list(choice.token_ids)
            body["weights"] = [run._asdict() for run in choice.weights]
        return body


@dataclasses.dataclass(frozen=True)
class ParsedBlocks:
    """A chat request of one choice, to be answered in the blocks of another API, whose events are
    named by their `type`."""

    chat: ParsedChat
    named_events: ClassVar[bool] = True

    @property
    def prompts(self) -> tuple[TokenizedPrompt, ...]:
        return self.chat.prompts

    @property
    def params(self) -> SamplingParams:
        return self.chat.params

    @property
    def beam(self) -> BeamSearchParams | None:
        return self.chat.beam

    @property
    def cache_salt(self) -> str | None:
        return self.chat.cache_salt

    @property
    def lora_request(self) -> LoRARequest | None:
        return self.chat.lora_request

    @property
    def stream(self) -> bool:
        return self.chat.stream

    @property
    def ignored_tools(self) -> str | None:
        return self.chat.ignored_tools

    @property
    def names(self) -> Mapping[str, str]:
        return self.chat.names


class ChatChunks:
    """Chunks of a streamed response: role, deltas of reasoning, content and tool calls, finish
    reason."""

    def __init__(self, parsed: ParsedChat, request_id: str, created: int) -> None:
        self._parsed = parsed
        self._request_id = request_id
        self._head = parsed.head(request_id, created, "chat.completion.chunk")
        self._usage = StreamUsage(parsed.prompts, parsed.include_usage, parsed.continuous_usage)
        self._readers = [parsed.reader() for _ in range(parsed.params.n)]
        self._num_calls = [0] * parsed.params.n

    def begin(self) -> Iterator[dict[str, Any]]:
        for index in range(self._parsed.params.n):
            content, reasoning = self._parsed.echo
            start = {"role": "assistant", "content": content, "refusal": None}
            if reasoning and self._parsed.include_reasoning:
                start |= in_both_names(reasoning)
            chunk = self._chunk(index, start)
            if self._parsed.token_ids:
                chunk["prompt_token_ids"] = list(self._parsed.prompts[0].token_ids)
            yield chunk

    def add(self, number: int, deltas: Sequence[Delta]) -> Iterator[dict[str, Any]]:
        """Chunks for new deltas; `number` is the index of the single prompt."""
        for delta in deltas:
            self._usage.count(delta)
            reader = self._readers[delta.index]
            pieces = reader.push(delta.text)
            if delta.finish_reason is not None:
                pieces += reader.finish()
            gained = self._gained(delta.index, pieces)
            scores = self._parsed.scores(delta)
            chunk = self._chunk(delta.index, gained)
            choice = chunk["choices"][0]
            choice["logprobs"] = scores
            has_calls = self._num_calls[delta.index] > 0
            choice["finish_reason"] = finish_reason(delta.finish_reason, has_calls)
            if delta.finish_reason is not None:
                choice["stop_reason"] = delta.stop_reason
            if self._parsed.token_ids:
                choice["token_ids"] = list(delta.token_ids)
            wanted = gained or scores or delta.finish_reason
            if wanted or (self._parsed.token_ids and delta.token_ids):
                yield chunk

    def end(self, outputs: Sequence[RequestOutput]) -> Iterator[dict[str, Any]]:
        """The final chunks, once the output is complete."""
        if self._parsed.include_usage:
            yield {**self._head, "choices": [], "usage": self._parsed.usage(outputs)}

    def failed(self, reply: ErrorReply) -> Iterator[dict[str, Any]]:
        """The event of an error after the beginning."""
        yield reply.body

    def _gained(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The delta of a choice that has gained `pieces`."""
        gained: dict[str, Any] = {}
        for piece in pieces:
            match piece.kind:
                case "content":
                    gained["content"] = gained.get("content", "") + piece.text
                case "reasoning" if self._parsed.include_reasoning:
                    gained |= in_both_names(gained.get("reasoning", "") + piece.text)
                case "call":
                    number = self._num_calls[index]
                    self._num_calls[index] += 1
                    gained.setdefault("tool_calls", []).append(
                        {
                            "index": number,
                            "id": call_id(self._request_id, index, number),
                            "type": "function",
                            "function": {"name": piece.text, "arguments": ""},
                        }
                    )
                case "arguments":
                    calls = gained.setdefault("tool_calls", [])
                    if not calls:
                        more = {"index": self._num_calls[index] - 1, "function": {"arguments": ""}}
                        calls.append(more)
                    calls[-1]["function"]["arguments"] += piece.text
        return gained

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head, **self._usage.of_chunk, "choices": [choice]}


def in_both_names(reasoning: str | None) -> dict[str, str | None]:
    """Reasoning in a message, as vLLM calls it, and as DeepSeek's API and most others do: clients
    know one of the names."""
    return {"reasoning": reasoning, "reasoning_content": reasoning}


def call_id(request_id: str, index: int, number: int) -> str:
    """The id of a choice's tool call, the same if the request is resent under the same id. It has
    29 characters: OpenAI takes back 40 at most."""
    place = f"{request_id}-{index}-{number}".encode()
    return f"call_{hashlib.blake2b(place, digest_size=12).hexdigest()}"


def finish_reason(reason: str | None, has_calls: bool) -> str | None:
    return "tool_calls" if has_calls and reason == "stop" else reason
