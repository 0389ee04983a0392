"""The offline API: one model, prompts in, finished outputs or a stream of deltas out."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.metrics import Metric
from jaxserve.engine.request import Request
from jaxserve.engine.trace import write_trace
from jaxserve.errors import RequestError
from jaxserve.outputs import CompletionOutput, Delta, RequestMetrics, RequestOutput
from jaxserve.runtime.startup import EnginePlan, Progress, no_progress
from jaxserve.sampling_params import SamplingParams
from jaxserve.text import Tokenizer

Prompt = str | SequenceOf[int] | Mapping[str, SequenceOf[int]]
"""Text, token ids, or {"prompt_token_ids": [...]}."""
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
        progress: Progress = no_progress,
        trace_file: str | Path | None = None,
        **settings: Any,
    ) -> None:
        """`settings` are the other fields of EngineConfig (dtype, max_model_len, scheduler, ...).

        `progress` is told how startup goes; `trace_file` receives a timeline for Perfetto when
        the engine is closed. Raises ConfigError, ModelError or MemoryPlanError.
        """
        self._trace_file = trace_file
        self._ids = itertools.count()
        self.engine = Engine.load(
            EngineConfig(model=model, **settings),
            progress=progress,
            keep_events=trace_file is not None,
        )

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        priority: SequenceOf[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs come in the order of the prompts.

        `sampling_params` is one for all or one for each prompt; None takes the model's own
        defaults. Lower `priority` runs first. Of several prompts a bad one fails alone: its
        output has finish_reason "error" and says why in `error`. A single bad prompt raises
        RequestError. When interrupted, nothing keeps running.
        """
        single = _is_single(prompts)
        batch = [prompts] if single else list(prompts)
        return self._run(batch, sampling_params, use_tqdm, priority, alone=single)

    def chat(
        self,
        messages: Messages | SequenceOf[Messages],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of {"role", "content"} messages."""
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations = [messages] if single else list(messages)
        prompts = [
            self.chat_prompt(conversation, add_generation_prompt, **template_variables)
            for conversation in conversations
        ]
        return self._run(prompts, sampling_params, use_tqdm, None, alone=single)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> DeltaStream:
        """Deltas of one prompt as they come. Leaving the loop early aborts the request."""
        params = sampling_params or self.default_sampling_params()
        request = self.engine.add(str(next(self._ids)), _unwrap(prompt), params)
        return DeltaStream(self.engine, request)

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        **template_variables: Any,
    ) -> DeltaStream:
        """Deltas of the answer to one conversation."""
        prompt = self.chat_prompt(messages, **template_variables)
        return self.stream(prompt, sampling_params)

    def abort(self, request_id: str) -> bool:
        """End a request early; False if there is no such unfinished request."""
        return self.engine.abort(request_id) is not None

    def chat_prompt(
        self, messages: Messages, add_generation_prompt: bool = True, **template_variables: Any
    ) -> list[int]:
        """Token ids of a conversation laid out by the model's chat template."""
        tokenizer = self.get_tokenizer()
        text = tokenizer.apply_chat_template(messages, add_generation_prompt, **template_variables)
        return tokenizer.encode(text, add_special_tokens=False)

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """What the model's generation_config.json recommends, with `overrides`."""
        defaults = dict(self.engine.plan.geometry.model.default_sampling)
        return SamplingParams.from_defaults(defaults, **overrides)

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def get_metrics(self) -> dict[str, Metric]:
        """Counters, gauges and histograms since the start, by exported name."""
        return self.engine.snapshot()

    def plan(self) -> EnginePlan:
        """Sizes, memory and programs of this engine."""
        return self.engine.plan

    def close(self) -> None:
        """End what runs, free the device, write the trace file. May be called twice."""
        self.engine.close()
        if self._trace_file is not None:
            write_trace(self._trace_file, self.engine.log.records)
            self._trace_file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: list[Prompt],
        sampling_params: Params,
        use_tqdm: bool,
        priority: SequenceOf[int] | None,
        *,
        alone: bool,
    ) -> list[RequestOutput]:
        params = self._params_for(sampling_params, len(prompts))
        priorities = _matching("priority", priority, len(prompts))
        outputs: dict[str, RequestOutput] = {}
        ids = [str(next(self._ids)) for _ in prompts]
        bar = tqdm(total=len(prompts), disable=not use_tqdm, unit="req", dynamic_ncols=True)
        try:
            for request_id, prompt, *wishes in zip(ids, prompts, params, priorities):
                try:
                    self.engine.add(request_id, _unwrap(prompt), *wishes)
                except RequestError as error:
                    if alone:
                        raise
                    outputs[request_id] = _refused(request_id, error)
                    bar.update()
            pending = set(ids) - set(outputs)
            while pending:
                for request in self.engine.step():
                    if request.request_id not in pending:
                        continue  # An open stream's, which takes its deltas itself.
                    request.take_deltas()
                    if request.finished:
                        pending.remove(request.request_id)
                        outputs[request.request_id] = self.engine.output(request)
                        bar.update()
        except BaseException:
            for request_id in ids:
                self.engine.abort(request_id)
            raise
        finally:
            bar.close()
        return [outputs[request_id] for request_id in ids]

    def _params_for(self, sampling_params: Params, count: int) -> list[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * count
        return _matching("sampling_params", sampling_params, count)


class DeltaStream(Iterator[Delta]):
    """Deltas of one request, until it ends. Closing or dropping the stream aborts what is left.

    Several streams and calls of `generate` may be under way on one engine: whoever asks for more
    steps it for all of them.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        self.request_id = request.request_id
        self._engine = engine
        self._request = request
        self._ready: collections.deque[Delta] = collections.deque()

    def __next__(self) -> Delta:
        try:
            while not self._ready:
                # Others may have stepped the engine since: what came meanwhile is taken before
                # the end is believed, or another step made.
                self._ready.extend(self._request.take_deltas())
                if not self._ready:
                    if self._request.finished:
                        raise StopIteration
                    self._engine.step()
        except KeyboardInterrupt:
            self.close()
            raise
        return self._ready.popleft()

    def close(self) -> None:
        """End the request, if it has not ended. May be called twice."""
        self._engine.abort(self.request_id)

    def __del__(self) -> None:
        self.close()


def _is_single(prompts: Prompt | SequenceOf[Prompt]) -> bool:
    """Whether this is one prompt and not a list of them."""
    if isinstance(prompts, (str, Mapping)):
        return True
    return bool(prompts) and isinstance(prompts[0], int)


def _unwrap(prompt: Prompt) -> str | SequenceOf[int]:
    if not isinstance(prompt, Mapping):
        return prompt
    if set(prompt) != {"prompt_token_ids"}:
        raise RequestError(
            f"a prompt given as a dict has the one key 'prompt_token_ids', not {sorted(prompt)}."
        )
    return prompt["prompt_token_ids"]


def _matching(name: str, values: SequenceOf[Any] | None, count: int) -> list[Any]:
    if values is None:
        return [None] * count
    if len(values) != count:
        raise RequestError(f"{name} has {len(values)} entries for {count} prompts; give one each.")
    return list(values)


def _refused(request_id: str, error: RequestError) -> RequestOutput:
    """The output of a request that was never accepted."""
    return RequestOutput(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=(),
        outputs=[CompletionOutput(index=0, text="", token_ids=(), finish_reason="error")],
        finished=True,
        metrics=RequestMetrics(arrival_us=0),
        error=str(error),
    )
