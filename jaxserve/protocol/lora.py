"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM."""

from __future__ import annotations

from pydantic import Field, StrictBool

from jaxserve.protocol.fields import Fields, Ignored


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
