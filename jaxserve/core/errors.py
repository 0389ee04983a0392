"""All errors raised to users. Each message names the offending value and how to fix it.

There are two families. A `RequestError` fails one request only; any other error concerns the model
or the engine, and is raised before the first request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class JaxserveError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(JaxserveError, ValueError):
    """An engine setting is out of range or contradicts another."""


class ModelError(JaxserveError):
    """A model cannot be found, read or parsed."""


class UnsupportedModelError(ModelError):
    """The architecture, or a feature that its config requires, is not implemented."""


class WeightsError(ModelError):
    """A weight file is missing, corrupt, or does not match the model's config."""


class AdapterError(ModelError):
    """A LoRA adapter cannot be read, or does not fit the model or the engine's settings."""


class MemoryPlanError(JaxserveError):
    """Weights, KV pool and program temporaries do not fit the device.

    `alternatives` are changes of settings, each of which has been planned and fits.
    """

    def __init__(self, message: str, alternatives: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(message)
        self.alternatives = [dict(changes) for changes in alternatives]


class OutOfMemoryError(JaxserveError):
    """A device has too little free memory at the moment; another process may hold it."""


class ProgramMissError(JaxserveError):
    """A step needs a shape outside the compiled set. It is never compiled implicitly."""


class DistributedError(JaxserveError):
    """The hosts of a job cannot be started or cannot connect, or one of them was lost."""


class ReplicaLostError(DistributedError):
    """A replica does not answer: its process has ended, or cannot be reached."""


class RestartError(DistributedError):
    """The replicas cannot be restarted now."""


class SnapshotError(JaxserveError):
    """A snapshot cannot be written, is corrupt, or cannot be restored into this engine."""


class EndpointError(JaxserveError):
    """An OpenAI endpoint to benchmark cannot be reached, or rejects standard requests."""


class BatchError(JaxserveError):
    """A batch job's input cannot be read, or its output cannot be written or is of another job."""


class EngineClosedError(JaxserveError, RuntimeError):
    """The engine was closed, or its loop failed with the error given as the cause."""


class EngineAsleepError(JaxserveError, RuntimeError):
    """The engine sleeps and has no memory to run requests; `wake_up` it first."""


class MissingDependencyError(JaxserveError, ImportError):
    """A feature needs a package that only an extra of jaxserve installs."""


class StepTimeoutError(JaxserveError):
    """A step has not ended in time: the device, or another host, hangs."""


class RequestError(JaxserveError, ValueError):
    """A request is malformed: contradictory sampling fields, token ids out of range, and so on."""


class ChatTemplateError(RequestError):
    """A chat template is invalid, rejects a conversation, or exceeds a limit: a message that begins
    with "the chat template"."""


class OverloadedError(RequestError):
    """The queue is full; the request may be retried later."""


class PromptTooLongError(RequestError):
    """The prompt leaves no room to generate within the context, or can never fit the KV pool."""
