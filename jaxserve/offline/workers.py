"""What runs the prompts of a batch job: an engine of this thread, or replicas behind a client."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from jaxserve.core.cluster_status import ClusterStatus
from jaxserve.core.engine_info import EngineInfo
from jaxserve.core.errors import BatchError, EngineClosedError, OverloadedError
from jaxserve.core.requests.outputs import RequestOutput
from jaxserve.engine.client import ClusterClient
from jaxserve.engine.output_queue import left_output
from jaxserve.offline.grammars_ahead import with_grammars
from jaxserve.offline.windows import BatchPrompt
from jaxserve.text import Tokenizer

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine
    from jaxserve.engine.request import Request
    from jaxserve.structured.grammar import Grammar

WAIT_S = 0.5
"""How long outputs of replicas are waited for at a time: between, results are synced to disk."""

RETRY_S = 0.5
"""How long a prompt waits that a replica is too busy for."""

POLL_S = 0.05

STATUS_S = 5.0
"""How long the status of replicas may take."""


class PromptProgress(NamedTuple):
    """New tokens of a prompt by its request id, and how it has ended, if it has: by its output, or
    by an error that leaves other prompts alone."""

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    ended: RequestOutput | Exception | None


class Worker(Protocol):
    """What runs prompts; for one thread."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def has_room(self) -> bool:
        """Whether another prompt should be added, so that one always waits."""

    def prepared(
        self, prompts: Iterable[BatchPrompt]
    ) -> Iterator[tuple[BatchPrompt, Future[Grammar] | None]]:
        """Prompts in order, some ahead of those that are added, each with what `add` waits for."""

    def add(self, request_id: str, prompt: BatchPrompt, grammar: Future[Grammar] | None) -> None:
        """Raises RequestError for a prompt that is refused."""

    def wait(self) -> None:
        """Until there is progress, or for a moment. An interrupt ends it."""

    def step(self) -> Iterable[PromptProgress]:
        """The progress of prompts since the last call. Raises what ends the job."""

    def abort(self, request_id: str) -> None:
        """End a prompt, of which no further progress is reported."""


class EngineWorker:
    """An engine that this thread steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: dict[str, tuple[Request, bool]] = {}

    @property
    def info(self) -> EngineInfo:
        return self._engine.plan.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def has_room(self) -> bool:
        return self._engine.scheduler.num_waiting < self.info.config.max_num_seqs

    def prepared(
        self, prompts: Iterable[BatchPrompt]
    ) -> Iterator[tuple[BatchPrompt, Future[Grammar] | None]]:
        return with_grammars(self._engine, prompts)

    def add(self, request_id: str, prompt: BatchPrompt, grammar: Future[Grammar] | None) -> None:
        request = self._engine.add(
            request_id,
            prompt.tokenized,
            prompt.params,
            shared_prefix=prompt.shared,
            grammar=None if grammar is None else grammar.result(),
        )
        self._running[request_id] = request, False

    def wait(self) -> None:
        """`step` computes."""

    def step(self) -> list[PromptProgress]:
        progress = []
        for request in self._engine.step():
            deltas, name = request.take_deltas(), request.request_id
            running, started = self._running.get(name, (None, False))
            if running is not request:
                continue  # Aborted, or not a request of this job.
            self._running[name] = request, True
            num_prompt_tokens = 0 if started else len(request.prompt_token_ids)
            num_output_tokens = sum(len(delta.token_ids) for delta in deltas)
            output = None
            if request.finished:
                output = self._engine.output(request)
                del self._running[name]
            progress.append(PromptProgress(name, num_prompt_tokens, num_output_tokens, output))
        return progress

    def abort(self, request_id: str) -> None:
        if self._running.pop(request_id, None) is not None:
            self._engine.abort(request_id)


def check_answers(client: ClusterClient, settings: Mapping[str, object]) -> None:
    """Raises BatchError when the answers of replicas, perhaps on other machines, would not be those
    of a job with these `settings`."""
    info = client.info
    theirs, ours = info.config.dtype, settings["dtype"]
    if theirs != ours:
        raise BatchError(
            f"dtype is {theirs} in the replicas, and {ours} in the job, by the devices of this "
            f"machine; add --dtype {ours}, or --dtype {theirs} and give another output."
        )
    if info.fingerprint != settings["model"]:
        raise BatchError(
            f"the weights of {str(info.config.model)!r} in the replicas are not those on this "
            "machine; copy the same files to every machine of the Ray cluster."
        )


class ReplicasWorker:
    """Replicas, whose outputs a thread waits for. Close it, or use it in a `with`, before them."""

    def __init__(self, client: ClusterClient) -> None:
        self._client = client
        self._most = 2 * client.info.max_num_seqs  # As many wait as run.
        self._running: dict[str, tuple[Future[None], int]] = {}
        self._num_sequences = 0
        self._num_suspects = 0
        self._alone = asyncio.Lock()
        self._ended: deque[tuple[str, RequestOutput | Exception]] = deque()
        self._any_ended = threading.Event()
        self._stop = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="jaxserve-batch", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        return self._client.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._client.get_tokenizer()

    @property
    def has_room(self) -> bool:
        return self._num_sequences < self._most and not self._num_suspects

    def prepared(self, prompts: Iterable[BatchPrompt]) -> Iterator[tuple[BatchPrompt, None]]:
        return ((prompt, None) for prompt in prompts)  # Replicas compile grammars.

    def add(self, request_id: str, prompt: BatchPrompt, grammar: Future[Grammar] | None) -> None:
        running = asyncio.run_coroutine_threadsafe(self._run(request_id, prompt), self._loop)
        self._running[request_id] = running, prompt.params.n
        self._num_sequences += prompt.params.n

    def wait(self) -> None:
        self._any_ended.wait(WAIT_S)

    def step(self) -> list[PromptProgress]:
        """Raises EngineClosedError when no replica is left."""
        self._any_ended.clear()
        progress = []
        while self._ended:
            name, ended = self._ended.popleft()
            if name not in self._running:
                continue  # It was aborted.
            if isinstance(ended, EngineClosedError) and self._is_closed:
                continue  # Not an error of this prompt.
            self._forget(name)
            num_prompt_tokens = num_output_tokens = 0
            if isinstance(ended, RequestOutput):
                num_prompt_tokens = len(ended.prompt_token_ids)
                num_output_tokens = sum(len(choice.token_ids) for choice in ended.outputs)
            progress.append(PromptProgress(name, num_prompt_tokens, num_output_tokens, ended))
        if not progress and self._is_closed:
            raise EngineClosedError(
                f"no replica is left: {self._client.failure}. Run the same command again to resume."
            )
        return progress

    def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._forget(request_id).cancel()

    def status(self) -> ClusterStatus | None:
        """What each replica is, if it can be told."""
        telling = asyncio.run_coroutine_threadsafe(self._client.cluster_status(), self._loop)
        try:
            return telling.result(STATUS_S)
        except (EngineClosedError, TimeoutError):
            return None

    def close(self) -> None:
        """Abort what runs, and end the thread."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def _is_closed(self) -> bool:
        return self._client.failure is not None or self._client.ended.done()

    def _forget(self, request_id: str) -> Future[None]:
        running, num_sequences = self._running.pop(request_id)
        self._num_sequences -= num_sequences
        return running

    # In the thread

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._stop.wait())

    async def _run(self, request_id: str, prompt: BatchPrompt) -> None:
        ended: RequestOutput | Exception
        try:
            ended = await self._output(request_id, prompt)
        except Exception as error:
            ended = error
        self._ended.append((request_id, ended))
        self._any_ended.set()

    async def _output(self, request_id: str, prompt: BatchPrompt) -> RequestOutput:
        """Raises what the prompt fails with. Of prompts that were given up after several replicas
        were lost with all of them, one may be the reason: each is tried again, alone."""
        try:
            return await self._answered(request_id, prompt)
        except EngineClosedError:
            if self._is_closed:
                raise
        self._num_suspects += 1
        try:
            async with self._alone:
                while len(self._running) > self._num_suspects:
                    await asyncio.sleep(POLL_S)
                return await self._answered(request_id, prompt)
        finally:
            self._num_suspects -= 1

    async def _answered(self, request_id: str, prompt: BatchPrompt) -> RequestOutput:
        while True:
            try:
                updates = await self._client.submit(
                    [prompt.tokenized], prompt.params, [request_id], wants_deltas=False
                )
            except OverloadedError:
                await asyncio.sleep(RETRY_S)
            else:
                return await left_output(updates)
