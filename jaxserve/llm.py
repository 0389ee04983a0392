"""The offline API: one model, prompts in, finished outputs or a stream of deltas out."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np

from jaxserve.beam_search import BeamSearchOutput, BeamSearchParams, search
from jaxserve.core.config import EngineConfig, EngineSettings
from jaxserve.core.errors import RequestError
from jaxserve.core.output_file import check_output_file
from jaxserve.core.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxserve.core.progress_bar import ProgressBar
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import SharedPrefix
from jaxserve.engine.delta_stream import DeltaStream
from jaxserve.engine.engine import Engine
from jaxserve.engine.interrupts import interrupts_held
from jaxserve.engine.prompts import Prompt, TokenizedPrompt
from jaxserve.engine.request import Request
from jaxserve.metrics.metrics import Metric
from jaxserve.metrics.trace import write_trace
from jaxserve.runtime.progress import TerminalProgress
from jaxserve.runtime.startup import EnginePlan, Progress, no_progress
from jaxserve.scheduler.prefix_groups import planned_order
from jaxserve.text import Tokenizer

Messages = SequenceOf[Mapping[str, Any]]
Params = SamplingParams | SequenceOf[SamplingParams] | None


class LLM:
    """A model ready to generate. Runs in the caller's thread; close it, or use it in a `with`.

    >>> with LLM() as llm:
    ...     print(llm.chat([{"role": "user", "content": "Hi!"}])[0].outputs[0].text)
    """

    def __init__(
        self,
        model: str | Path = EngineConfig.model,
        *,
        progress: Progress | None = None,
        trace_file: str | Path | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        """`settings` are the other fields of EngineConfig (dtype, max_model_len, scheduler, ...).

        `progress` is called during startup; by default bars are drawn on a terminal. `trace_file`
        receives a timeline for Perfetto when the engine is closed. Raises ConfigError, ModelError
        or MemoryPlanError.
        """
        if trace_file is not None:
            check_output_file("trace_file", trace_file)
        self._trace_file = trace_file
        self._ids = itertools.count()
        self._open: dict[str, Request] = {}
        config = EngineConfig.of(model=model, **settings)
        with TerminalProgress() as bars:
            self.engine = Engine.load(
                config,
                progress=progress or (bars if bars.draws else no_progress),
                keep_events=trace_file is not None,
            )

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        priority: int | SequenceOf[int] | None = None,
        tenant: str | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs are in the order of the prompts.

        `sampling_params` is one for all prompts or one per prompt; None means the model's defaults.
        Lower `priority` runs first, one for all prompts or one per prompt; without one, prompts
        with a common prefix run together, so that the prefix is computed once. Tenants do not share
        cached prefixes. An invalid prompt in a list fails alone, with a warning: its output has
        finish_reason "error" and the reason in `error`. A single invalid prompt raises
        RequestError. An interrupt aborts all requests of the call.
        """
        single = _is_single(prompts)
        batch = [prompts] if single else list(prompts)
        return self._run(batch, sampling_params, use_tqdm, priority, tenant, single)

    def chat(
        self,
        messages: Messages | SequenceOf[Messages],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool | None = None,
        tenant: str | None = None,
        *,
        priority: int | SequenceOf[int] | None = None,
        continue_final_message: bool = False,
        tools: SequenceOf[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of {"role", "content"} messages.

        `priority` is as in `generate`; what makes the prompt is as in `chat_prompt`. An invalid
        conversation in a list fails alone, as in `generate`. A single invalid conversation raises
        RequestError, and so does a text in the place of a conversation.
        """
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, SequenceOf):
            raise RequestError(
                f"messages is {messages!r:.80}; give a conversation, such as "
                '[{"role": "user", "content": "Hi!"}], or a list of them.'
            )
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations = [messages] if single else list(messages)
        lay_out = functools.partial(
            self.chat_prompt,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._run(
            conversations, sampling_params, use_tqdm, priority, tenant, single, prompt_of=lay_out
        )

    def beam_search(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = True,
        tenant: str | None = None,
    ) -> list[BeamSearchOutput]:
        """Find the `beam_width` most likely continuations of each prompt as whole sequences.

        An invalid prompt in a list fails alone, with a warning: its output has no sequences and
        the reason in `error`. A single invalid prompt raises RequestError. An interrupt aborts all
        requests of the call.
        """
        single = _is_single(prompts)
        batch = [prompts] if single else list(prompts)
        ids = iter(self._next_id, None)
        with ProgressBar("Searched prompts", len(batch), show=use_tqdm) as bar:
            found = search(self.engine, batch, params, ids, bar.update, single, tenant)
        _warn_of_errors([output.error for output in found], stacklevel=3)
        return found

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        tenant: str | None = None,
    ) -> DeltaStream:
        """Deltas of one prompt as they arrive. Leaving the loop early aborts the request."""
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        with interrupts_held():
            request = self.engine.add(self._next_id(), prompt, sampling_params, tenant=tenant)
            return self._stream_of(request)

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        tenant: str | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: SequenceOf[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> DeltaStream:
        """Deltas of the answer to one conversation; its prompt is made as in `chat_prompt`."""
        prompt = self.chat_prompt(
            messages,
            add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.stream(prompt, sampling_params, tenant)

    @property
    def has_work(self) -> bool:
        """Whether a call of `generate` or a stream is open."""
        return bool(self._open)

    def snapshot(
        self, directory: str | Path, with_kv: bool = True, deadline_s: float | None = None
    ) -> None:
        """Save the requests of all open `generate` calls and streams, between steps; `restore`
        resumes them in another process, on any devices.

        `with_kv` also saves their KV and the prefix cache, for `deadline_s` seconds at most. KV
        that is not saved is recomputed. Raises SnapshotError.
        """
        ended = [request for request in self._open.values() if request.finished]
        self.engine.snapshot(directory, with_kv, deadline_s, ended)

    def check_snapshot(self, directory: str | Path) -> None:
        """Raises SnapshotError when `snapshot` could not write to a directory."""
        self.engine.check_snapshot(directory)

    def restore(self, directory: str | Path) -> list[DeltaStream]:
        """Streams of the requests of a snapshot, in the order of their prompts; each begins with
        the output generated before, and aborts its request when dropped. Raises SnapshotError."""
        with interrupts_held():
            # By number: a list of prompts may have been added in another order.
            requests = sorted(
                self.engine.restore(directory),
                key=lambda request: (len(request.request_id), request.request_id),
            )
            return [self._stream_of(request) for request in requests]

    def export_request(self, request_id: str, with_kv: bool = True) -> Iterator[bytes]:
        """The request of an open stream as bytes, for `import_request` of another engine on any
        devices: in parts of about 64 MB, made one by one. Read the last before this engine goes on.

        The request runs on here as well, with the same tokens, until its stream is closed.

        Raises RequestError when no unfinished request has this id, SnapshotError when a part is
        read too late.
        """
        return self.engine.export_request(request_id, with_kv)

    def import_request(self, parts: Iterable[bytes]) -> DeltaStream:
        """A stream of a request that another engine has exported, with an id of this one; it begins
        with the output generated before.

        Raises SnapshotError, with the request not added, when a part is damaged or missing, when
        this engine has another model, vocabulary, dtype or quantization or is too small for the
        request.
        """
        with interrupts_held():
            return self._stream_of(self.engine.import_request(parts, self._next_id()))

    def abort(self, request_id: str) -> bool:
        """End a request early; False if there is no such unfinished request."""
        return self.engine.abort(request_id) is not None

    def set_priority(self, request_id: str, priority: int) -> bool:
        """Change the priority of a request, lower running first; False if it has finished."""
        return self.engine.set_priority(request_id, priority)

    def reset_prefix_cache(self) -> None:
        """Drop every cached prefix."""
        self.engine.reset_prefix_cache()

    def chat_prompt(
        self,
        messages: Messages,
        add_generation_prompt: bool | None = None,
        *,
        continue_final_message: bool = False,
        tools: SequenceOf[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation laid out by the model's chat template, which gets
        `chat_template_kwargs` as variables (such as `enable_thinking`).

        The prompt ends with the start of the assistant's turn unless `add_generation_prompt` is
        False, or inside the last message with `continue_final_message`. Raises RequestError for
        messages that the template rejects.
        """
        return self.engine.chat_prompt(
            messages,
            add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """The defaults of the model's generation_config.json, with `overrides`."""
        return self.engine.default_sampling_params(**overrides)

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def get_metrics(self) -> dict[str, Metric]:
        """Counters, gauges and histograms since the start, by exported name."""
        return self.engine.get_metrics()

    def plan(self) -> EnginePlan:
        """Sizes, memory and programs of this engine."""
        return self.engine.plan

    def close(self) -> None:
        """Abort running requests, free the device, write the trace file. Idempotent."""
        self.engine.close()
        if self._trace_file is not None:
            write_trace(self._trace_file, self.engine.log.records)
            self._trace_file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _run(
        self,
        inputs: list[Any],
        sampling_params: Params,
        use_tqdm: bool,
        priority: int | SequenceOf[int] | None,
        tenant: str | None,
        alone: bool,
        prompt_of: Callable[[Any], Prompt] = lambda prompt: prompt,
    ) -> list[RequestOutput]:
        """Run the prompts that `prompt_of` makes of inputs; an invalid one raises if `alone`."""
        params = self._params_for(sampling_params, len(inputs))
        if isinstance(priority, int):
            priority = [priority] * len(inputs)
        priorities = _matching("priority", priority, len(inputs))
        outputs: dict[str, RequestOutput] = {}
        ids = [self._next_id() for _ in inputs]
        bar = ProgressBar("Processed prompts", len(inputs), show=use_tqdm)

        def refuse(index: int, error: RequestError) -> None:
            if alone:
                raise error
            outputs[ids[index]] = self._refused(ids[index], inputs[index], error)
            bar.update(len(outputs))

        try:
            prompts: dict[int, TokenizedPrompt] = {}
            for index, given in enumerate(inputs):
                try:
                    prompts[index] = self.engine.tokenize(prompt_of(given))
                except RequestError as error:
                    refuse(index, error)
            order = list(self._order(prompts, params, planned=priority is None))
            with interrupts_held():  # A snapshot has all of them or none.
                for index, shared in order:
                    options = params[index], priorities[index], tenant, shared
                    try:
                        request = self.engine.add(ids[index], prompts[index], *options)
                    except RequestError as error:
                        refuse(index, error)
                    else:
                        self._open[request.request_id] = request
            pending = set(ids) - set(outputs)
            while pending:
                for request in self.engine.step():
                    if request.request_id not in pending:
                        continue  # An open stream takes its own deltas.
                    request.take_deltas()
                    if request.finished:
                        pending.remove(request.request_id)
                        outputs[request.request_id] = self.engine.output(request)
                        bar.update(len(outputs))
        except BaseException:
            for request_id in ids:
                self.engine.abort(request_id)
            raise
        finally:
            bar.close()
            for request_id in ids:
                self._open.pop(request_id, None)
        ordered = [outputs[request_id] for request_id in ids]
        _warn_of_errors([output.error for output in ordered])
        return ordered

    def _next_id(self) -> str:
        """An id that no open request has; restored requests keep theirs."""
        return next(number for number in map(str, self._ids) if number not in self._open)

    def _stream_of(self, request: Request) -> DeltaStream:
        self._open[request.request_id] = request
        return DeltaStream(self.engine, request, self._open)

    def _order(
        self, prompts: dict[int, TokenizedPrompt], params: list[SamplingParams], planned: bool
    ) -> Iterator[tuple[int, SharedPrefix | None]]:
        """The prompts in the order to add them, each with its shared prefix."""
        config = self.engine.plan.config
        if not planned or not config.enable_prefix_caching or len(prompts) < 2:
            return ((index, None) for index in prompts)
        indices = list(prompts)
        limits = (getattr(params[index], "max_tokens", None) for index in indices)
        order = planned_order(
            [prompts[index].token_ids for index in indices],
            [limit or config.max_model_len for limit in limits],
            config.page_size,
        )
        return ((indices[place], shared) for place, shared in order)

    def _refused(self, request_id: str, given: Any, error: RequestError) -> RequestOutput:
        """The output of a rejected request."""
        return RequestOutput(
            request_id=request_id,
            prompt=given if isinstance(given, str) else None,
            prompt_token_ids=(),
            outputs=[CompletionOutput(index=0, text="", token_ids=(), finish_reason="error")],
            finished=True,
            metrics=RequestMetrics(arrival_us=self.engine.log.now()),
            error=str(error),
        )

    def _params_for(self, sampling_params: Params, count: int) -> list[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        if not isinstance(sampling_params, (list, tuple)):
            return [sampling_params] * count
        return _matching("sampling_params", sampling_params, count)


def _warn_of_errors(errors: SequenceOf[str | None], stacklevel: int = 4) -> None:
    """Warns once if any of several prompts has failed; `stacklevel` leads to the user's call."""
    failed = [index for index, error in enumerate(errors) if error is not None]
    if failed:
        warnings.warn(
            f"{len(failed)} of {len(errors)} prompts failed, the first at index {failed[0]}: "
            f"{errors[failed[0]]} See the `error` of each output.",
            stacklevel=stacklevel,
        )


def _is_single(prompts: Any) -> bool:
    """Whether this is one prompt and not a list of them."""
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, SequenceOf):
        return True
    return bool(prompts) and isinstance(prompts[0], (int, np.integer))


def _matching(name: str, values: SequenceOf[Any] | None, count: int) -> list[Any]:
    """One value for each of `count` prompts. Raises RequestError for any other number."""
    if values is None:
        return [None] * count
    if not isinstance(values, SequenceOf):
        raise RequestError(f"{name} is {values!r}; give a list with one entry for each prompt.")
    if len(values) != count:
        raise RequestError(f"{name} has {len(values)} entries for {count} prompts; give one each.")
    return list(values)
