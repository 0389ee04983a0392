"""A list of prompts run to the end: a failure does not affect the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from jaxserve.core.errors import RequestError
from jaxserve.core.process.progress_bar import ProgressBar
from jaxserve.core.process.signals import interrupts_held
from jaxserve.core.requests.lora import LoRARequest, check_lora_request
from jaxserve.core.requests.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxserve.core.requests.pooling import PoolingParams
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import SharedPrefix
from jaxserve.engine.engine import Engine
from jaxserve.engine.input_processor import check_params
from jaxserve.engine.prompts import Prompt, TokenizedPrompt
from jaxserve.engine.request import Request
from jaxserve.scheduler.prefix_groups import planned_order

RequestParams = SamplingParams | PoolingParams


class PromptBatch:
    """The prompts of one call. The caller's thread steps the engine, for open streams as well."""

    def __init__(
        self, engine: Engine, open_: dict[str, Request], ids: list[str], tenant: str | None
    ) -> None:
        """`ids` of their requests; `open_` has requests whose output a caller still wants."""
        self._engine = engine
        self._open = open_
        self._ids = ids
        self._tenant = tenant

    def run(
        self,
        inputs: list[Any],
        params: RequestParams | SequenceOf[RequestParams],
        priority: int | SequenceOf[int] | None,
        prompt_of: Callable[[Any], Prompt],
        alone: bool,
        show_progress: bool,
        lora_request: LoRARequest | SequenceOf[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Run the prompts that `prompt_of` makes of inputs; an invalid one raises if `alone`.
        `params`, `priority` and `lora_request` are for all, or one for each; without a priority,
        prompts with a common prefix and adapter run together. An interrupt aborts all of them."""
        ids, engine = self._ids, self._engine
        if not isinstance(params, (list, tuple)):
            params = [params] * len(inputs)
        pooled = any(isinstance(each, PoolingParams) for each in params)
        named = "pooling_params" if pooled else "sampling_params"
        params = _matching(named, params, len(inputs))
        if isinstance(priority, int):
            priority = [priority] * len(inputs)
        priorities = _matching("priority", priority, len(inputs))
        if not isinstance(lora_request, (list, tuple)):
            lora_request = [lora_request] * len(inputs)
        adapters = _matching("lora_request", lora_request, len(inputs))
        for each in params:
            check_params(each)
        for each in adapters:
            if each is not None:
                check_lora_request(each)
        planned = priority is None and all(each == adapters[0] for each in adapters)
        outputs: dict[str, RequestOutput] = {}
        bar = ProgressBar("Processed prompts", len(inputs), show=show_progress)

        def refuse(index: int, error: RequestError) -> None:
            if alone:
                raise error
            outputs[ids[index]] = self._refused(ids[index], inputs[index], error)
            bar.update(len(outputs))

        try:
            prompts: dict[int, TokenizedPrompt] = {}
            for index, given in enumerate(inputs):
                try:
                    prompts[index] = engine.tokenize(prompt_of(given))
                except RequestError as error:
                    refuse(index, error)
            order = list(self._order(prompts, params, planned))
            with interrupts_held():  # A snapshot has all of them or none.
                for index, shared in order:
                    options = params[index], priorities[index], self._tenant, shared
                    lora = {"lora_request": adapters[index]}
                    try:
                        request = engine.add(ids[index], prompts[index], *options, **lora)
                    except RequestError as error:
                        refuse(index, error)
                    else:
                        self._open[request.request_id] = request
            pending = set(ids) - set(outputs)
            while pending:
                for request in engine.step():
                    if request.request_id not in pending:
                        continue  # An open stream takes its own deltas.
                    request.take_deltas()
                    if request.finished:
                        pending.remove(request.request_id)
                        outputs[request.request_id] = engine.output(request)
                        bar.update(len(outputs))
        except BaseException:
            for request_id in ids:
                engine.abort(request_id)
            raise
        finally:
            bar.close()
            for request_id in ids:
                self._open.pop(request_id, None)
        ordered = [outputs[request_id] for request_id in ids]
        warn_of_errors([output.error for output in ordered], stacklevel=5)
        return ordered

    def _order(
        self, prompts: dict[int, TokenizedPrompt], params: SequenceOf[RequestParams], planned: bool
    ) -> Iterator[tuple[int, SharedPrefix | None]]:
        """The prompts in the order to add them, each with its shared prefix."""
        config = self._engine.plan.config
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
            metrics=RequestMetrics(arrival_us=self._engine.log.now()),
            error=str(error),
        )


def warn_of_errors(errors: SequenceOf[str | None], stacklevel: int) -> None:
    """Warns once if any of several prompts has failed; `stacklevel` leads to the user's call."""
    failed = [index for index, error in enumerate(errors) if error is not None]
    if failed:
        warnings.warn(
            f"{len(failed)} of {len(errors)} prompts failed, the first at index {failed[0]}: "
            f"{errors[failed[0]].rstrip('.')}. See the `error` of each output.",
            stacklevel=stacklevel,
        )


def is_single(prompts: Any) -> bool:
    """Whether this is one prompt and not a list of them."""
    if isinstance(prompts, Iterator):
        return False
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
