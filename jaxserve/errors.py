"""Every error a user can meet. Each message names the offending value and the way out.

Two families matter to a caller. A `RequestError` concerns one request, which fails alone;
anything else concerns the model or the engine, and is raised before the first request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class JaxserveError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(JaxserveError, ValueError):
    """An engine setting is out of range or contradicts another."""


class ModelError(JaxserveError):
    """A model cannot be found, read or understood."""


class UnsupportedModelError(ModelError):
    """The architecture, or a feature its config asks for, is not implemented."""


class WeightsError(ModelError):
    """A weight file is missing, corrupt, or does not match the model's config."""


class MemoryPlanError(JaxserveError):
    """Weights, KV pool and program temporaries do not fit the device.

    `alternatives` are changes of settings, each of which was planned and fits.
    """

    def __init__(self, message: str, alternatives: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(message)
        self.alternatives = [dict(changes) for changes in alternatives]


class ProgramMissError(JaxserveError):
    """A step asked for a shape outside the compiled set. Never compiled behind the user's back."""


class DistributedError(JaxserveError):
    """The hosts of a job cannot be started, do not come together, or one of them was lost."""


class CheckpointError(JaxserveError):
    """The state of an engine cannot be written, is damaged, or is not this engine's to take up."""


class EndpointError(JaxserveError):
    """An OpenAI endpoint to measure cannot be reached, or refuses what every such one takes."""


class BatchError(JaxserveError):
    """A batch job's input cannot be read, or its output cannot be written or is another job's."""


class EngineClosedError(JaxserveError, RuntimeError):
    """The engine was closed, or its loop died of the error given as the cause."""


class RequestError(JaxserveError, ValueError):
    """A request is malformed: contradictory sampling fields, token ids out of range, and so on."""


class OverloadedError(RequestError):
    """Too much waits already; the request may be sent again later."""


class PromptTooLongError(RequestError):
    """The prompt leaves no room to generate within the context, or can never fit the KV pool."""
