"""The response to a chat request: whole, or streamed in chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from jaxserve.core.outputs import CompletionOutput, Delta, RequestOutput
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.prompts import TokenizedPrompt
from jaxserve.protocol.logprobs import chat_logprobs, prompt_logprobs, token_names
from jaxserve.protocol.model import Model
from jaxserve.protocol.tool_calls import Format, ToolCall, ToolReader
from jaxserve.protocol.tools import Tool
from jaxserve.protocol.usage import StreamUsage, usage


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
class Chat:
    """A chat request, with one prompt; choice i is its sequence i.

    `tokens_as_ids` is of logprobs. `echoed` is text that each answer begins with. `warning` says
    which part of the request the answer leaves out.
    """

    model: Model
    prompts: tuple[TokenizedPrompt, ...]
    params: SamplingParams
    cache_salt: str | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    tool_use: ToolUse | None
    prompt_logprobs: bool
    token_ids: bool
    tokens_as_ids: bool
    echoed: str
    warning: str | None

    def response(
        self, outputs: Sequence[RequestOutput], request_id: str, created: int
    ) -> dict[str, Any]:
        """The response body, from the single output."""
        (output,) = outputs
        body = {
            **self.head(request_id, created, "chat.completion"),
            "choices": [self._choice(choice, request_id) for choice in output.outputs],
            "usage": usage(outputs),
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
        }

    def scores(self, source: CompletionOutput | Delta) -> dict[str, Any] | None:
        """Log probabilities of the generated tokens, if requested."""
        if self.params.logprobs is None or source.logprobs is None:
            return None
        tokenizer = self.model.tokenizer
        return chat_logprobs(
            source.token_ids,
            source.logprobs,
            self.params.logprobs,
            tokenizer,
            token_names(tokenizer, self.tokens_as_ids),
        )

    def _choice(self, choice: CompletionOutput, request_id: str) -> dict[str, Any]:
        content, calls = choice.text, ()
        if self.tool_use is not None:
            reader = self.tool_use.reader()
            before = reader.push(choice.text)
            rest, calls = reader.finish()
            content = before + rest
        content = self.echoed + content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content.strip() or None
            message["tool_calls"] = call_bodies(calls, request_id, choice.index)
        answer = {
            "index": choice.index,
            "message": message,
            "logprobs": self.scores(choice),
            "finish_reason": finish_reason(choice.finish_reason, bool(calls)),
            "stop_reason": choice.stop_reason,
        }
        if self.token_ids:
            answer["token_ids"] = list(choice.token_ids)
        return answer


class ChatChunks:
    """Chunks of a streamed response: role, content deltas, tool calls, finish reason."""

    def __init__(self, call: Chat, request_id: str, created: int) -> None:
        self._call = call
        self._request_id = request_id
        self._head = call.head(request_id, created, "chat.completion.chunk")
        self._usage = StreamUsage(call.prompts, call.include_usage, call.continuous_usage)
        self._readers: dict[int, ToolReader] = {}
        if call.tool_use is not None:
            self._readers = {index: call.tool_use.reader() for index in range(call.params.n)}

    def begin(self) -> Iterator[dict[str, Any]]:
        for index in range(self._call.params.n):
            chunk = self._chunk(index, {"role": "assistant", "content": self._call.echoed})
            if self._call.token_ids:
                chunk["prompt_token_ids"] = list(self._call.prompts[0].token_ids)
            yield chunk

    def add(self, number: int, deltas: Sequence[Delta]) -> Iterator[dict[str, Any]]:
        """Chunks for new deltas; `number` is the index of the single prompt."""
        for delta in deltas:
            self._usage.count(delta)
            text, calls = delta.text, ()
            if reader := self._readers.get(delta.index):
                text = reader.push(text)
                if delta.finish_reason is not None:
                    rest, calls = reader.finish()
                    text += rest
            gained: dict[str, Any] = {"content": text} if text else {}
            if calls:
                bodies = call_bodies(calls, self._request_id, delta.index)
                gained["tool_calls"] = [{"index": i, **body} for i, body in enumerate(bodies)]
            scores = self._call.scores(delta)
            chunk = self._chunk(delta.index, gained)
            choice = chunk["choices"][0]
            choice["logprobs"] = scores
            choice["finish_reason"] = finish_reason(delta.finish_reason, bool(calls))
            if delta.finish_reason is not None:
                choice["stop_reason"] = delta.stop_reason
            if self._call.token_ids:
                choice["token_ids"] = list(delta.token_ids)
            wanted = gained or scores or delta.finish_reason
            if wanted or (self._call.token_ids and delta.token_ids):
                yield chunk

    def end(self, outputs: Sequence[RequestOutput]) -> Iterator[dict[str, Any]]:
        """The final chunks, once the output is complete."""
        if self._call.include_usage:
            yield {**self._head, "choices": [], "usage": usage(outputs)}

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head, **self._usage.of_chunk, "choices": [choice]}


def call_bodies(calls: Sequence[ToolCall], request_id: str, index: int) -> list[dict[str, Any]]:
    """Tool calls, with ids that are stable if the request is resent under the same id."""
    return [call.body(f"call-{request_id}-{index}-{number}") for number, call in enumerate(calls)]


def finish_reason(reason: str | None, has_calls: bool) -> str | None:
    return "tool_calls" if has_calls and reason == "stop" else reason
