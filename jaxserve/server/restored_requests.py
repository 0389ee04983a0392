"""Requests of a snapshot, which their clients claim by sending them again."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence

from jaxserve.core.errors import RequestError
from jaxserve.core.requests.outputs import CompletionOutput, Delta
from jaxserve.engine.client import EngineClient, Restored
from jaxserve.engine.output_queue import Update
from jaxserve.protocol.endpoints import ParsedRequest
from jaxserve.protocol.errors import FieldError


class RestoredRequests:
    """The restored requests of an engine that no client has claimed, by id. For one event loop."""

    def __init__(self, engine: EngineClient, requests: Mapping[str, Restored]) -> None:
        self._engine = engine
        self._requests = dict(requests)

    def __len__(self) -> int:
        return len(self._requests)

    def of_others(self, ids: Sequence[str], tenant: str | None) -> bool:
        """Whether one of these requests is not this tenant's."""
        found = [self._requests[name] for name in ids if name in self._requests]
        return any(request.tenant != tenant for request in found)

    def of(self, parsed: ParsedRequest, ids: Sequence[str]) -> dict[int, Restored]:
        """Those of a request whose prompts have these ids, by number of prompt. Raises RequestError
        if one differs from its prompt."""
        found = {i: self._requests[name] for i, name in enumerate(ids) if name in self._requests}
        for number, request in found.items():
            _check_same(request, parsed, number, ids[number])
        return found

    async def claimed(
        self,
        ids: Sequence[str],
        restored: Mapping[int, Restored],
        new: Sequence[int],
        updates: AsyncIterable[tuple[int, Update]],
    ) -> AsyncIterator[tuple[int, Update]]:
        """Updates of a request with `restored` prompts, and new ones, whose numbers are `new`.
        Yields only when all have finished, because until then the next snapshot must contain
        them."""
        outputs = {new[place]: output async for place, output in updates}
        for number, request in restored.items():
            outputs[number] = await asyncio.shield(request.output)
        for number in restored:
            self._requests.pop(ids[number], None)
            await self._engine.claim(ids[number])
        for number, output in sorted(outputs.items()):
            yield number, [_as_delta(choice) for choice in output.outputs]
            yield number, output


def _check_same(request: Restored, parsed: ParsedRequest, number: int, request_id: str) -> None:
    """Raises RequestError if a restored request differs from prompt `number`."""
    if list(request.prompt_token_ids) != list(parsed.prompts[number].token_ids):
        raise RequestError(f"request_id {request_id!r} was used for another prompt.")
    if request.lora_request != parsed.lora_request:
        raise FieldError("model", f"is not the one that request_id {request_id!r} had.")
    for field in dataclasses.fields(parsed.params):
        was, now = getattr(request.params, field.name, None), getattr(parsed.params, field.name)
        if was != now and field.name != "priority":
            raise FieldError(
                field.name, f"is {now!r:.80}, but request_id {request_id!r} had {was!r:.80}."
            )


def _as_delta(choice: CompletionOutput) -> Delta:
    return Delta(
        choice.index,
        choice.text,
        choice.token_ids,
        choice.logprobs,
        choice.finish_reason,
        choice.stop_reason,
    )
