"""`/cluster/resize`."""

from __future__ import annotations

from pydantic import Field

from jaxserve.protocol.fields import Fields


class ResizeRequest(Fields):
    """Another mesh for a replica. A size that is left out stays."""

    replica: int = Field(description="Its index, as in `/cluster/status`.", ge=0)
    tensor_parallel_size: int | None = Field(default=None, ge=1)
    pipeline_parallel_size: int | None = Field(default=None, ge=1)
    context_parallel_size: int | None = Field(default=None, ge=1)
