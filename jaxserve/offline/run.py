"""Run a batch job on an engine, keeping its waiting queue full."""

from __future__ import annotations

import dataclasses
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.core.chat_settings import ChatSettings
from jaxserve.core.errors import RequestError
from jaxserve.core.outputs import RequestOutput
from jaxserve.core.signals import interrupts_held
from jaxserve.offline.grammars_ahead import with_grammars
from jaxserve.offline.job import BatchJob, settings_of
from jaxserve.offline.journal import Result
from jaxserve.offline.requests import BatchRequest, refused
from jaxserve.offline.timeline import Timeline
from jaxserve.offline.totals import Totals
from jaxserve.offline.windows import Prompt, Window, windows
from jaxserve.protocol.errors import renamed
from jaxserve.protocol.model import Model

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine
    from jaxserve.engine.request import Request
    from jaxserve.llm import LLM
    from jaxserve.structured.grammar import Grammar


class BatchRun:
    """This process's part of a job, and its statistics.

    `totals` count the whole output as far as this host knows it, `done` and `cached_tokens` the
    lines of this run. For each request `latency_us` has the time from its first step to its last,
    and `token_us`, if it has several tokens, the mean time between them. `complete` means that no
    line is left, here or on another host. `started` and `ended` are Unix times, equal until `run`
    has ended.
    """

    def __init__(self, job: BatchJob) -> None:
        self.job = job
        self.started = self.ended = time.time()
        self.num_left = job.num_left()
        self.done = 0
        self.timeline = Timeline()
        self.cached_tokens = 0
        self.latency_us = array("q")
        self.token_us = array("q")
        self.complete = False
        self._lines: dict[int, _Line] = {}
        self._running: dict[str, _Running] = {}
        self._next: tuple[Prompt, Future[Grammar] | None] | None = None

    @property
    def totals(self) -> Totals:
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
        engine: Engine,
        names: Sequence[str] = (),
        progress: Callable[[BatchRun], None] = lambda run: None,
        chat: ChatSettings | None = None,
    ) -> None:
        """Run the remaining lines. `names` are the model's; `progress` is called after every step.
        `chat` are the settings of chats, by default those of a server.

        On any exit, finished lines are in the output, and all requests have left the engine.
        Raises BatchError if the output cannot be written, and what `Engine.step` raises.
        """
        model = Model.of(engine.plan.info, engine.tokenizer, names, chat)
        self.timeline = Timeline()
        try:
            with windows(self.job, model, engine.plan.config.page_size) as read:
                prompts = with_grammars(engine, self._prompts(read))
                while self._feed(engine, prompts) or self._running:
                    with interrupts_held():  # Results of a finished step are always written.
                        self._take(engine, engine.step())
                    self.job.sync_if_due()
                    progress(self)
        finally:
            self.timeline.sample()
            self.ended = time.time()
            for request_id in self._running:
                engine.abort(request_id)
        self.complete = self.job.end()

    def _prompts(self, read: Iterator[Window]) -> Iterator[Prompt]:
        for window in read:
            self._write(window.refused)
            yield from window.prompts

    def _feed(
        self, engine: Engine, prompts: Iterator[tuple[Prompt, Future[Grammar] | None]]
    ) -> bool:
        """Add prompts until as many sequences wait as can run at once, or until the next prompt's
        grammar is still compiling while others run. False once all are added."""
        while engine.scheduler.num_waiting < engine.plan.config.max_num_seqs:
            self._next = self._next or next(prompts, None)
            if self._next is None:
                return False
            prompt, grammar = self._next
            if grammar is not None and not grammar.done() and self._running:
                return True
            self._next = None
            self._add(engine, prompt, grammar)
        return True

    def _add(self, engine: Engine, prompt: Prompt, grammar: Future[Grammar] | None) -> None:
        request = prompt.request
        line = self._lines.setdefault(request.number, _Line(request, len(request.prompts)))
        line.to_come -= 1
        if not line.refused:
            self._submit(engine, prompt, line, grammar)
        if line.refused and not line.to_come:
            del self._lines[request.number]

    def _submit(
        self, engine: Engine, prompt: Prompt, line: _Line, grammar: Future[Grammar] | None
    ) -> None:
        request, place = prompt.request, prompt.place
        request_id = f"{request.number}.{place}"
        try:
            added = engine.add(
                request_id,
                request.prompts[place],
                request.params(place),
                shared_prefix=prompt.shared,
                grammar=None if grammar is None else grammar.result(),
            )
        except RequestError as error:
            line.refused = True
            named = renamed(error, request.call.names)
            for other in [name for name, running in self._running.items() if running.line is line]:
                engine.abort(other)
                del self._running[other]
            self._write([refused(request.number, request.custom_id, named)])
        else:
            self._running[request_id] = _Running(line, place, added)

    def _take(self, engine: Engine, touched: Sequence[Request]) -> None:
        """Count the new tokens of requests, and write the lines that they finish."""
        results = []
        for request in touched:
            deltas = request.take_deltas()
            running = self._running.get(request.request_id)
            if running is None or running.request is not request:
                continue  # Aborted, or not a request of this run.
            prompt_tokens = 0 if running.started else len(request.prompt_token_ids)
            running.started = True
            self.timeline.add(prompt_tokens, sum(len(delta.token_ids) for delta in deltas))
            if request.finished:
                del self._running[request.request_id]
                line = running.line
                line.outputs[running.place] = self._counted(engine.output(request))
                if len(line.outputs) == len(line.request.prompts):
                    del self._lines[line.request.number]
                    results.append(line.result(self.job.created))
        self._write(results)

    def _counted(self, output: RequestOutput) -> RequestOutput:
        times = output.metrics
        self.cached_tokens += times.cached_tokens
        if times.finish_us is not None and times.first_token_us is not None:
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
    prompts that are not yet in the engine."""

    request: BatchRequest
    to_come: int
    outputs: dict[int, RequestOutput] = dataclasses.field(default_factory=dict)
    refused: bool = False

    def result(self, created: int) -> Result:
        return self.request.result([output for _, output in sorted(self.outputs.items())], created)


@dataclasses.dataclass
class _Running:
    """A prompt of a line in the engine; `started` once its first token is counted."""

    line: _Line
    place: int
    request: Request
    started: bool = False


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
