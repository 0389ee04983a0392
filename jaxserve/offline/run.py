"""Run a batch job on an engine, keeping its waiting queue full."""

from __future__ import annotations

import dataclasses
import logging
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.core.cluster_status import ReplicaStatus
from jaxserve.core.errors import EngineClosedError, RequestError
from jaxserve.core.process.signals import interrupts_held
from jaxserve.core.requests.outputs import RequestOutput
from jaxserve.core.settings.chat_settings import ChatSettings
from jaxserve.offline.job import BatchJob, settings_of
from jaxserve.offline.journal import Result
from jaxserve.offline.requests import BatchRequest, refused
from jaxserve.offline.timeline import Timeline
from jaxserve.offline.totals import JobTotals
from jaxserve.offline.windows import BatchPrompt, Window, windows
from jaxserve.offline.workers import EngineWorker, PromptProgress, ReplicasWorker, Worker
from jaxserve.protocol.errors import renamed
from jaxserve.protocol.model import Model

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine
    from jaxserve.llm import LLM
    from jaxserve.structured.grammar import Grammar

_log = logging.getLogger(__name__)


class BatchRun:
    """This process's part of a job, and its statistics.

    `totals` count the whole output as far as this host knows it, `done` and `cached_tokens` the
    lines of this run. For each request `output_tokens` has the tokens of its answer, `latency_us`
    the time from its first step to its last, and `token_us`, if it has several tokens, the mean
    time between them. `replicas` are those that it ran on, at its end, if there were several.
    `complete` means that no line is left, here or on another host. `started` and `ended` are Unix
    times, equal until `run` has ended.
    """

    def __init__(self, job: BatchJob) -> None:
        self.job = job
        self.started = self.ended = time.time()
        self.num_left = job.num_left()
        self.done = 0
        self.timeline = Timeline()
        self.cached_tokens = 0
        self.output_tokens = array("q")
        self.latency_us = array("q")
        self.token_us = array("q")
        self.complete = False
        self.replicas: tuple[ReplicaStatus, ...] = ()
        self._lines: dict[int, _Line] = {}
        self._running: dict[str, tuple[_Line, int]] = {}  # and the place of the prompt in it
        self._next: tuple[BatchPrompt, Future[Grammar] | None] | None = None

    @property
    def totals(self) -> JobTotals:
        return self.job.totals

    @property
    def left_s(self) -> float | None:
        """Estimated time left, from the tokens per line so far; None if unknown."""
        tokens, rate = self.timeline.tokens, self.timeline.tokens_per_s
        if not self.done or not rate:
            return None
        return max(0.0, tokens / self.done * self.num_left - tokens) / rate

    @property
    def cached_share(self) -> float:
        """Fraction of this run's prompt tokens that hit the prefix cache."""
        return self.cached_tokens / max(1, self.timeline.samples[-1].prompt_tokens)

    def run(
        self,
        engine: Engine | ReplicasWorker,
        names: Sequence[str] = (),
        progress: Callable[[BatchRun], None] = lambda run: None,
        chat: ChatSettings | None = None,
    ) -> None:
        """Run the remaining lines, on one engine or on replicas. `names` are the model's;
        `progress` is called after every step. `chat` are the settings of chats, by default those of
        a server.

        On any exit, finished lines are in the output, and all requests have left the engine.
        Raises BatchError if the output cannot be written, and what `Engine.step` or
        `ReplicasWorker.step` raises.
        """
        worker = engine if isinstance(engine, ReplicasWorker) else EngineWorker(engine)
        model = Model.of(worker.info, worker.tokenizer, names, chat)
        self.timeline = Timeline()
        try:
            with windows(self.job, model, worker.info.config.page_size) as read:
                prompts = worker.prepared(self._prompts(read))
                while self._feed(worker, prompts) or self._running:
                    worker.wait()
                    with interrupts_held():  # Results of a finished step are always written.
                        self._take(worker, worker.step())
                    self.job.sync_if_due()
                    progress(self)
        finally:
            self.timeline.sample()
            self.ended = time.time()
            if isinstance(worker, ReplicasWorker) and (status := worker.status()) is not None:
                self.replicas = status.replicas
            for request_id in self._running:
                worker.abort(request_id)
        self.complete = self.job.end()

    def _prompts(self, read: Iterator[Window]) -> Iterator[BatchPrompt]:
        for window in read:
            self._write(window.refused)
            yield from window.prompts

    def _feed(
        self, worker: Worker, prompts: Iterator[tuple[BatchPrompt, Future[Grammar] | None]]
    ) -> bool:
        """Add prompts until as many sequences wait as can run at once, or until the next prompt's
        grammar is still compiling while others run. False once all are added."""
        while worker.has_room:
            self._next = self._next or next(prompts, None)
            if self._next is None:
                return False
            prompt, grammar = self._next
            if grammar is not None and not grammar.done() and self._running:
                return True
            self._next = None
            self._add(worker, prompt, grammar)
        return True

    def _add(self, worker: Worker, prompt: BatchPrompt, grammar: Future[Grammar] | None) -> None:
        request = prompt.request
        line = self._lines.setdefault(request.number, _Line(request, len(request.prompts)))
        line.to_come -= 1
        if not line.refused:
            request_id = f"{request.number}.{prompt.place}"
            self._running[request_id] = line, prompt.place
            try:
                worker.add(request_id, prompt, grammar)
            except RequestError as error:
                self._refuse(worker, line, error)
        if line.refused and not line.to_come:
            self._lines.pop(request.number, None)

    def _refuse(self, worker: Worker, line: _Line, error: Exception) -> None:
        """A line ends with an error of one of its prompts."""
        request = line.request
        line.refused = True
        for name in [name for name, (of, _) in self._running.items() if of is line]:
            worker.abort(name)
            del self._running[name]
        if not line.to_come:
            del self._lines[request.number]
        if isinstance(error, RequestError):
            error = renamed(error, request.call.names)
        elif not isinstance(error, EngineClosedError):
            _log.error("line %d failed.", request.number, exc_info=error)
        self._write([refused(request.number, request.custom_id, error)])

    def _take(self, worker: Worker, steps: Iterable[PromptProgress]) -> None:
        """Count the new tokens of prompts, and write the lines that they finish."""
        results = []
        for name, num_prompt_tokens, num_output_tokens, ended in steps:
            if name not in self._running:
                continue  # Its line was refused.
            self.timeline.add(num_prompt_tokens, num_output_tokens)
            if ended is None:
                continue
            line, place = self._running[name]
            if isinstance(ended, Exception):
                self._refuse(worker, line, ended)
                continue
            del self._running[name]
            line.outputs[place] = self._counted(ended)
            if len(line.outputs) == len(line.request.prompts):
                del self._lines[line.request.number]
                results.append(line.result(self.job.created))
        self._write(results)

    def _counted(self, output: RequestOutput) -> RequestOutput:
        times = output.metrics
        self.cached_tokens += times.cached_tokens
        self.output_tokens.append(sum(len(choice.token_ids) for choice in output.outputs))
        measured = None not in (times.finish_us, times.first_token_us, times.queue_us)
        if measured:  # Not of one that another replica has begun.
            self.latency_us.append(times.finish_us - times.arrival_us - times.queue_us)
            gaps = max(len(choice.token_ids) for choice in output.outputs) - 1
            if gaps:
                self.token_us.append((times.finish_us - times.first_token_us) // gaps)
        return output

    def _write(self, results: Sequence[Result]) -> None:
        if results:
            self.job.append(results)
            self.done += len(results)


@dataclasses.dataclass
class _Line:
    """A line in flight, with the outputs of its finished prompts by place. `to_come` counts its
    prompts that were not added yet."""

    request: BatchRequest
    to_come: int
    outputs: dict[int, RequestOutput] = dataclasses.field(default_factory=dict)
    refused: bool = False

    def result(self, created: int) -> Result:
        return self.request.result([output for _, output in sorted(self.outputs.items())], created)


def run_batch(
    llm: LLM,
    input: str | Path,
    output: str | Path,
    progress: Callable[[BatchRun], None] = lambda run: None,
) -> BatchRun:
    """Run every request in `input`, and append each result to `output` when it finishes.

    To resume an interrupted or killed job, call it again. Lines without a seed are seeded from the
    engine's `seed` and their custom_id. Returns the finished run, with its statistics.

    >>> with LLM() as llm:
    ...     run = run_batch(llm, "questions.jsonl", "answers.jsonl")

    Raises BatchError if the input cannot be read, or the output cannot be written or belongs to
    another job. An invalid line gets an error result and does not stop the job.
    """
    plan = llm.engine.plan
    settings = settings_of(plan.config, plan.checkpoint.fingerprint, llm.engine.tokenizer)
    with BatchJob(input, output, settings) as job:
        run = BatchRun(job)
        run.run(llm.engine, progress=progress)
        return run
