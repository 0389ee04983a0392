"""Requests that change an engine: `/update_weights_from_disk` as in SGLang, `/v1/load_lora_adapter`
and `/v1/unload_lora_adapter` as in vLLM, and `/cluster/resize`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictBool

from jaxserve.protocol.field_types import Ignored, only
from jaxserve.protocol.fields import Fields

_NEVER = "leave it out: requests keep their tokens and continue"


class UpdateWeightsRequest(Fields):
    """A checkpoint on the server's machine."""

    model_path: str = Field(
        description="A directory or file, or a Hugging Face id, of the served model.",
        min_length=1,
        max_length=4096,
    )
    abort_all_requests: Annotated[bool | None, only(False, remedy=_NEVER)] = None
    flush_cache: Annotated[
        bool | None, only(True, remedy="pages of the old weights are never used again")
    ] = None


class LoadAdapterRequest(Fields):
    """An adapter on the server's machine."""

    lora_name: str = Field(
        description="The model name of requests that use it.", min_length=1, max_length=256
    )
    lora_path: str = Field(
        description="A directory that PEFT wrote.", min_length=1, max_length=4096
    )
    load_inplace: StrictBool | None = Field(
        None, description="Whether it takes the place of an adapter that has its name."
    )


class UnloadAdapterRequest(Fields):
    """An adapter that is loaded."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_int_id: Ignored = None


class ResizeRequest(Fields):
    """Another mesh for a replica. A size that is left out stays."""

    replica: int = Field(description="Its index, as in `/cluster/status`.", ge=0)
    tensor_parallel_size: int | None = Field(default=None, ge=1)
    pipeline_parallel_size: int | None = Field(default=None, ge=1)
    context_parallel_size: int | None = Field(default=None, ge=1)
