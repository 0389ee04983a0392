"""Commands to a running engine as plain data, which the hosts of one job exchange."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.core.requests.lora import LoRARequest
from jaxserve.core.requests.pooling import PoolingParams
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import SharedPrefix


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddRequest:
    """A validated and tokenized request.

    `prompt` is its text, if it was given as text. Its sequences have consecutive ids from
    `first_seq_id` on. `shared_prefix` is the known common prefix with other requests' prompts.
    `arrival_us` is in microseconds on the engine's clock.
    """

    request_id: str
    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    priority: int | None
    tenant: str | None
    cache_salt: str | None
    seed: int
    first_seq_id: int
    pooling: PoolingParams | None = None
    lora_request: LoRARequest | None = None
    shared_prefix: SharedPrefix | None = dataclasses.field(default=None, compare=False)
    arrival_us: int = dataclasses.field(default=0, compare=False)

    def to_json(self, prefix: tuple[int, int] | None) -> dict[str, Any]:
        """All fields except the arrival time, which differs between hosts. `prefix` represents the
        shared prefix: its number and length in tokens."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["shared_prefix"], fields["arrival_us"]
        pooling = None if self.pooling is None else dataclasses.asdict(self.pooling)
        params = dataclasses.asdict(self.params)
        lora = None if self.lora_request is None else dataclasses.asdict(self.lora_request)
        fields |= {"params": params, "pooling": pooling, "lora_request": lora}
        return fields | {"prefix": prefix}

    @classmethod
    def from_json(
        cls, fields: dict[str, Any], shared_prefix: SharedPrefix | None, arrival_us: int = 0
    ) -> AddRequest:
        fields = {name: value for name, value in fields.items() if name != "prefix"}
        params = dict(fields["params"])
        if params["logit_bias"] is not None:
            params["logit_bias"] = {
                int(token): bias for token, bias in params["logit_bias"].items()
            }
        fields["params"] = SamplingParams(**params)
        if (pooling := fields.get("pooling")) is not None:
            fields["pooling"] = PoolingParams(**pooling)
        if (lora := fields.get("lora_request")) is not None:
            fields["lora_request"] = LoRARequest(**lora)
        return cls(**fields, shared_prefix=shared_prefix, arrival_us=arrival_us)


@dataclasses.dataclass(frozen=True)
class Abort:
    """Aborts a request, which keeps its output so far. Does nothing if it has finished."""

    request_id: str


@dataclasses.dataclass(frozen=True)
class SetPriority:
    """Changes the priority of an unfinished request; lower runs first."""

    request_id: str
    priority: int


@dataclasses.dataclass(frozen=True)
class ResetPrefixCache:
    """Clears the prefix cache. Running requests keep their pages."""


Command = AddRequest | Abort | SetPriority | ResetPrefixCache
