"""The offline API: one model, prompts in, finished outputs or a stream of deltas out."""

from __future__ import annotations

import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, NoReturn, Self, Unpack

from jaxserve.beam_batch import search
from jaxserve.core.errors import ConfigError, RequestError
from jaxserve.core.model_config import ModelConfig
from jaxserve.core.process.output_file import check_output_file
from jaxserve.core.process.progress_bar import ProgressBar
from jaxserve.core.process.signals import interrupts_held
from jaxserve.core.process.terminal_progress import TerminalProgress
from jaxserve.core.requests.lora import LoRARequest
from jaxserve.core.requests.outputs import RequestOutput
from jaxserve.core.requests.pooling import (
    EmbeddingRequestOutput,
    PoolingParams,
    ScoringRequestOutput,
    pairs,
)
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.settings.engine_settings import EngineSettings
from jaxserve.engine.beam_search import BeamSearchOutput, BeamSearchParams
from jaxserve.engine.delta_stream import DeltaStream
from jaxserve.engine.engine import Engine
from jaxserve.engine.prompts import Prompt
from jaxserve.engine.request import Request
from jaxserve.metrics.metric import Metric
from jaxserve.metrics.perfetto import write_trace
from jaxserve.prompt_batch import PromptBatch, is_single, warn_of_errors
from jaxserve.runtime.live_weights import WeightsSource
from jaxserve.runtime.startup.engine_plan import EnginePlan
from jaxserve.runtime.startup.start import StartupProgress, no_progress
from jaxserve.text import Tokenizer

Messages = SequenceOf[Mapping[str, Any]]
ParamsOrList = SamplingParams | SequenceOf[SamplingParams] | None
LoRAOrList = LoRARequest | SequenceOf[LoRARequest | None] | None


def _is_conversation(messages: Any) -> bool:
    """Whether this is a list of messages, valid or not."""
    is_list = isinstance(messages, SequenceOf) and not isinstance(messages, str | bytes)
    return is_list and all(isinstance(message, Mapping) for message in messages)


_LLMS: weakref.WeakSet[LLM] = weakref.WeakSet()


def _reset_locks_after_fork() -> None:
    """A forked child has no other threads; one may have held the lock."""
    for llm in _LLMS:
        llm._lock._at_fork_reinit()


os.register_at_fork(after_in_child=_reset_locks_after_fork)


class LLM:
    """A model ready to generate. Runs in the caller's thread; close it, or use it in a `with`.

    Threads take turns: a call waits until that of another thread has ended. `AsyncEngine` runs
    requests that arrive at any time in one batch.

    >>> with LLM() as llm:
    ...     print(llm.chat([{"role": "user", "content": "Hi!"}])[0].outputs[0].text)
    """

    def __init__(
        self,
        model: str | Path = EngineConfig.model,
        *,
        progress: StartupProgress | None = None,
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
        self._lock = threading.RLock()
        _LLMS.add(self)
        config = EngineConfig.of(model=model, **settings)
        if progress is not None and not callable(progress):
            raise ConfigError(f"progress is {progress!r:.80}; give a function, or leave it out.")
        with TerminalProgress() as bars:
            self.engine = Engine.load(
                config,
                progress=progress or (bars if bars.draws else no_progress),
                keep_events=trace_file is not None,
            )

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: ParamsOrList = None,
        use_tqdm: bool = True,
        priority: int | SequenceOf[int] | None = None,
        tenant: str | None = None,
        *,
        lora_request: LoRAOrList = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs are in the order of the prompts.

        `sampling_params` is one for all prompts or one per prompt; None means the model's defaults.
        Lower `priority` runs first, one for all prompts or one per prompt; without one, prompts
        with a common prefix run together, so that the prefix is computed once. Tenants do not share
        cached prefixes. `lora_request` is the LoRA adapter of all prompts or one per prompt, where
        None is none: it is loaded if it is not, and AdapterError is raised if it does not fit. An
        invalid prompt in a list fails alone, with a warning: its output has finish_reason "error"
        and the reason in `error`. A single invalid prompt raises RequestError. An interrupt aborts
        all requests of the call.
        """
        single = is_single(prompts)
        batch = [prompts] if single else list(prompts)
        if batch and all(isinstance(each, Mapping) and "role" in each for each in batch):
            raise RequestError("prompts are the messages of a conversation; give them to `chat`.")
        return self._run(
            batch, sampling_params, use_tqdm, priority, tenant, single, lora_request=lora_request
        )

    def chat(
        self,
        messages: Messages | SequenceOf[Messages],
        sampling_params: ParamsOrList = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool | None = None,
        tenant: str | None = None,
        *,
        lora_request: LoRAOrList = None,
        priority: int | SequenceOf[int] | None = None,
        continue_final_message: bool = False,
        tools: SequenceOf[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of {"role", "content"} messages.

        `priority` and `lora_request` are as in `generate`; what makes the prompt is as in
        `chat_prompt`. An invalid conversation in a list fails alone, as in `generate`. A single
        invalid conversation raises RequestError, and so does a text in the place of a conversation.
        """
        single = bool(messages) and _is_conversation(messages)
        is_text = isinstance(messages, str | bytes | Mapping)
        several = isinstance(messages, SequenceOf) and not is_text
        if not single and not (several and (not messages or any(map(_is_conversation, messages)))):
            raise RequestError(
                f"messages is {messages!r:.80}; give a conversation, such as "
                '[{"role": "user", "content": "Hi!"}], or a list of them.'
            )
        conversations = [messages] if single else list(messages)
        lay_out = functools.partial(
            self.chat_prompt,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._run(
            conversations,
            sampling_params,
            use_tqdm,
            priority,
            tenant,
            single,
            prompt_of=lay_out,
            lora_request=lora_request,
        )

    def embed(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | SequenceOf[PoolingParams] | None = None,
        tenant: str | None = None,
        lora_request: LoRAOrList = None,
    ) -> list[EmbeddingRequestOutput]:
        """One vector for each prompt, in their order: the final hidden state of its last token, by
        default, scaled to length 1.

        `pooling_params` is one for all prompts or one per prompt, and so is `lora_request`. An
        invalid prompt in a list fails alone, as in `generate`: its embedding is empty. A single one
        raises RequestError.
        """
        params = PoolingParams() if pooling_params is None else pooling_params
        for each in params if isinstance(params, list | tuple) else [params]:
            if not isinstance(each, PoolingParams):
                raise RequestError(f"pooling_params is {each!r:.80}; it must be a PoolingParams.")
        single = is_single(prompts)
        batch = [prompts] if single else list(prompts)
        found = self._run(batch, params, use_tqdm, None, tenant, single, lora_request=lora_request)
        return [EmbeddingRequestOutput.of(output) for output in found]

    def score(
        self,
        text_1: str | SequenceOf[str],
        text_2: str | SequenceOf[str],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        tenant: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """The cosine similarity of the embeddings of two texts: of one with each of `text_2`, or
        pair by pair; other arguments are those of `embed`, one for all texts. Raises RequestError
        for numbers of texts that do not pair up."""
        first, second = (
            [text] if isinstance(text, str) else list(text) for text in (text_1, text_2)
        )
        compared = pairs(first, second)
        texts = list(dict.fromkeys([*first, *second]))
        embedded = self.embed(
            texts,
            use_tqdm=use_tqdm,
            pooling_params=pooling_params,
            tenant=tenant,
            lora_request=lora_request,
        )
        by_text = dict(zip(texts, embedded))
        return [ScoringRequestOutput.of(by_text[first[a]], by_text[second[b]]) for a, b in compared]

    def beam_search(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = True,
        tenant: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> list[BeamSearchOutput]:
        """Find the `beam_width` most likely continuations of each prompt as whole sequences.

        An invalid prompt in a list fails alone, with a warning: its output has no sequences and
        the reason in `error`. A single invalid prompt raises RequestError. An interrupt aborts all
        requests of the call.
        """
        single = is_single(prompts)
        batch = [prompts] if single else list(prompts)
        ids = iter(self._next_id, None)
        with self._lock, ProgressBar("Searched prompts", len(batch), show=use_tqdm) as bar:
            found = search(
                self.engine, batch, params, ids, bar.update, single, tenant, lora_request
            )
        warn_of_errors([output.error for output in found], stacklevel=3)
        return found

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        tenant: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> DeltaStream:
        """Deltas of one prompt as they arrive. Leaving the loop early aborts the request."""
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        with self._lock, interrupts_held():
            request = self.engine.add(
                self._next_id(), prompt, sampling_params, tenant=tenant, lora_request=lora_request
            )
            return self._stream_of(request)

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        tenant: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: SequenceOf[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> DeltaStream:
        """Deltas of the answer to one conversation; its prompt is made as in `chat_prompt`."""
        prompt = self.chat_prompt(
            messages,
            add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.stream(prompt, sampling_params, tenant, lora_request=lora_request)

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
        with self._lock:
            # A stream may be collected out of turn, which removes its request.
            ended = [request for request in list(self._open.values()) if request.finished]
            self.engine.snapshots.write(directory, with_kv, deadline_s, ended)

    def check_snapshot(self, directory: str | Path) -> None:
        """Raises SnapshotError when `snapshot` could not write to a directory."""
        self.engine.snapshots.check(directory)

    def restore(self, directory: str | Path) -> list[DeltaStream]:
        """Streams of the requests of a snapshot, in the order of their prompts; each begins with
        the output generated before, and aborts its request when dropped. Raises SnapshotError."""
        with self._lock, interrupts_held():
            # By number: a list of prompts may have been added in another order.
            requests = sorted(
                self.engine.snapshots.restore(directory),
                key=lambda request: (len(request.request_id), request.request_id),
            )
            return [self._stream_of(request) for request in requests]

    def export_request(self, request_id: str, with_kv: bool = True) -> Iterator[bytes]:
        """The request of an open stream as bytes, for `import_request` of another engine on any
        devices: in parts of about 64 MB, made one by one. Read the last before this engine
        continues.

        The request runs on here as well, with the same tokens, until its stream is closed.

        Raises RequestError when no unfinished request has this id, SnapshotError when a part is
        read too late.
        """
        return self.engine.migration.export_request(request_id, with_kv)

    def import_request(self, parts: Iterable[bytes]) -> DeltaStream:
        """A stream of a request that another engine has exported, with an id of this one; it begins
        with the output generated before.

        Raises SnapshotError, with the request not added, when a part is damaged or missing, when
        this engine has another model, vocabulary, dtype or quantization or is too small for the
        request.
        """
        with self._lock, interrupts_held():
            return self._stream_of(self.engine.migration.import_request(parts, self._next_id()))

    def abort(self, request_id: str) -> bool:
        """End a request early; False if there is no such unfinished request."""
        with self._lock:
            return self.engine.abort(request_id) is not None

    def set_priority(self, request_id: str, priority: int) -> bool:
        """Change the priority of a request, lower running first; False if it has finished."""
        with self._lock:
            return self.engine.set_priority(request_id, priority)

    def reset_prefix_cache(self) -> None:
        """Drop every cached prefix."""
        with self._lock:
            self.engine.reset_prefix_cache()

    def add_lora(self, lora_request: LoRARequest, load_inplace: bool = False) -> None:
        """Load a LoRA adapter ahead of its first request. It then stays until `remove_lora`; those
        that requests load make room for the next when no request uses them. Compiles nothing.
        With `load_inplace` it takes the place of one with its name, which unfinished requests keep.

        Raises AdapterError when it does not fit, RequestError without `enable_lora` or when another
        adapter has its name, OverloadedError when no slot is free and none can be freed.
        """
        with self._lock:
            self.engine.load_adapter(lora_request, load_inplace)

    def remove_lora(self, name: str) -> None:
        """Unload a LoRA adapter, whose slot is free once the requests that use it have finished.
        Raises RequestError when there is no such adapter."""
        with self._lock:
            self.engine.unload_adapter(name)

    def list_loras(self) -> list[str]:
        """Names of the LoRA adapters that are loaded."""
        return sorted(self.engine.adapters.names)

    def update_weights(self, params: WeightsSource) -> int:
        """Replace the weights in place, and return their version, which `CompletionOutput.weights`
        names. `params` is a pytree of arrays with the structure of the model's parameters, on any
        devices, which are copied; or a checkpoint of the same model. Compiles nothing.

        Open streams keep their tokens, and the new weights make the next ones. Raises WeightsError,
        with the old weights serving, when structure, shapes or dtypes differ or the engine's are
        quantized; ModelError for a checkpoint that cannot be read.
        """
        with self._lock:
            return self.engine.weights.update(params)

    @property
    def weights_version(self) -> int:
        """How often `update_weights` has replaced the weights."""
        return self.engine.weights.version

    def sleep(self, level: int = 1) -> None:
        """Give the devices' memory back: the KV cache is dropped, and the weights are moved to host
        memory (level 1) or dropped (level 2). Open streams continue after `wake_up`."""
        with self._lock:
            self.engine.weights.sleep(level)

    def wake_up(self, tags: SequenceOf[str] | None = None) -> None:
        """Take the memory again, all of it or what `tags` names: "weights", "kv_cache". Weights
        dropped at level 2 are read from their checkpoint again, unless `update_weights` has put
        others in place by then.

        Raises OutOfMemoryError when another process holds the memory; call it again later.
        """
        with self._lock:
            self.engine.weights.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        """Whether memory is missing that `sleep` gave back; requests raise EngineAsleepError."""
        return self.engine.weights.asleep

    def chat_prompt(
        self,
        messages: Messages,
        add_generation_prompt: bool | None = None,
        *,
        continue_final_message: bool = False,
        tools: SequenceOf[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation laid out by the model's chat template, or `chat_template`,
        Jinja source in its place; it gets `chat_template_kwargs` as variables (such as
        `enable_thinking`).

        The prompt ends with the start of the assistant's turn unless `add_generation_prompt` is
        False, or inside the last message with `continue_final_message`. Raises RequestError for
        messages that the template rejects, and for tools where it has none.
        """
        return self.engine.tokenizer.encode_chat(
            messages,
            add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template=chat_template,
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

    @property
    def model_config(self) -> ModelConfig:
        """The model's config, as its checkpoint has it."""
        return self.plan().checkpoint.config

    def plan(self) -> EnginePlan:
        """Sizes, memory and programs of this engine."""
        return self.engine.plan

    def close(self) -> None:
        """Abort running requests, free the device, write the trace file. Idempotent."""
        with self._lock:
            self.engine.close()
            if self._trace_file is not None:
                write_trace(self._trace_file, self.engine.log.records)
                self._trace_file = None

    def __repr__(self) -> str:
        engine = self.__dict__.get("engine")
        return object.__repr__(self) if engine is None else f"<LLM {engine.plan}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM holds devices and cannot be pickled; make one in each process.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _run(
        self,
        inputs: list[Any],
        params: ParamsOrList | PoolingParams | SequenceOf[PoolingParams],
        use_tqdm: bool,
        priority: int | SequenceOf[int] | None,
        tenant: str | None,
        alone: bool,
        prompt_of: Callable[[Any], Prompt] = lambda prompt: prompt,
        lora_request: LoRAOrList = None,
    ) -> list[RequestOutput]:
        """Run the prompts that `prompt_of` makes of inputs; an invalid one raises if `alone`."""
        if params is None:
            params = self.default_sampling_params()
        with self._lock:
            ids = [self._next_id() for _ in inputs]
            batch = PromptBatch(self.engine, self._open, ids, tenant)
            return batch.run(inputs, params, priority, prompt_of, alone, use_tqdm, lora_request)

    def _next_id(self) -> str:
        """An id that no open request has; restored requests keep theirs."""
        return next(number for number in map(str, self._ids) if number not in self._open)

    def _stream_of(self, request: Request) -> DeltaStream:
        self._open[request.request_id] = request
        return DeltaStream(self.engine, request, self._open, self._lock)
