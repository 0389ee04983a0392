"""Windows of the input: each is read, tokenized and ordered while the previous one runs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jaxserve.core.errors import RequestError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import SharedPrefix
from jaxserve.engine.prompts import TokenizedPrompt
from jaxserve.offline.custom_ids import custom_id_of, implied_id
from jaxserve.offline.job import BatchJob
from jaxserve.offline.journal import Result
from jaxserve.offline.requests import BatchRequest, parse, refused
from jaxserve.protocol.model import Model
from jaxserve.scheduler.prefix_groups import planned_order

if TYPE_CHECKING:
    from jaxserve.core.settings.chat_settings import ChatSettings
    from jaxserve.engine.engine import Engine

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class BatchPrompt:
    """One of the prompts of a request."""

    request: BatchRequest
    place: int
    shared: SharedPrefix | None

    @property
    def tokenized(self) -> TokenizedPrompt:
        return self.request.prompts[self.place]

    @property
    def params(self) -> SamplingParams:
        return self.request.params(self.place)


@dataclasses.dataclass(frozen=True)
class Window:
    """Results of invalid lines, and the prompts of the others in execution order."""

    refused: list[Result]
    prompts: list[BatchPrompt]


@contextlib.contextmanager
def windows(job: BatchJob, model: Model, page_size: int) -> Iterator[Iterator[Window]]:
    """The windows left for this host. A thread reads one window ahead.

    Grain shards the windows over hosts and prefetches. Its iterator state is used to skip windows
    that are done; the journal tracks which lines are done, since lines finish in another order than
    they are read.
    """
    import grain  # imports JAX, which takes a second

    def read(indices: list[int]) -> Window:
        return _read(job, model, page_size, range(indices[0], indices[-1] + 1))

    mine = range(job.shard.index, job.num_windows, job.shard.count)
    first = next((place for place, window in enumerate(mine) if job.num_left_in(window)), None)
    if first is None:
        yield iter(())
        return
    dataset = grain.MapDataset.range(len(job.lines)).batch(job.window_lines, batch_fn=list)
    dataset = dataset[job.shard.index :: job.shard.count].map(read)
    ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
    iterator = iter(dataset.to_iter_dataset(ahead))
    iterator.set_state({"next_index": first})
    with contextlib.closing(iterator):
        yield iterator


def lengths(
    job: BatchJob,
    engine: Engine,
    count: int,
    names: Sequence[str] = (),
    chat: ChatSettings | None = None,
) -> list[tuple[int, int]]:
    """Tokens of the prompts of the first `count` lines, and of the answers that they may get;
    invalid lines have none. `names` and `chat` are as for `BatchRun.run`."""
    model = Model.of(engine.plan.info, engine.tokenizer, names, chat)
    found = []
    for index in range(min(count, len(job.lines))):
        request = _request(job, model, index)
        if isinstance(request, BatchRequest):
            for place, prompt in enumerate(request.prompts):
                found.append((len(prompt.token_ids), _decode_tokens(request, place, model)))
    return found


def _read(job: BatchJob, model: Model, page_size: int, window: range) -> Window:
    refusals: list[Result] = []
    requests: list[BatchRequest] = []
    for index in job.left_in(window):
        line = _request(job, model, index)
        if isinstance(line, BatchRequest):
            requests.append(line)
        else:
            refusals.append(line)
    prompts = [(request, place) for request in requests for place in range(len(request.prompts))]
    order = planned_order(
        [request.prompts[place].token_ids for request, place in prompts],
        [_decode_tokens(request, place, model) for request, place in prompts],
        page_size,
    )
    return Window(refusals, [BatchPrompt(*prompts[index], shared) for index, shared in order])


def _request(job: BatchJob, model: Model, index: int) -> BatchRequest | Result:
    number = job.lines.number(index)
    custom_id = implied_id(number)
    try:
        record = job.lines[index]
    except RequestError as error:
        return refused(number, custom_id, error, "invalid_line")
    try:
        custom_id = custom_id_of(record, number)
        if index in job.duplicates:
            earlier = job.lines.number(job.duplicates[index])
            duplicate = RequestError(
                f"custom_id {custom_id!r:.80} is already used by line {earlier}; give each its own."
            )
            return refused(number, custom_id, duplicate, "duplicate_custom_id")
        return parse(record, number, model, job.settings["seed"])
    except RequestError as error:
        return refused(number, custom_id, error)
    except Exception as error:  # A bug fails one line, not the job.
        _log.exception("line %d could not be read.", number)
        return refused(number, custom_id, error, "internal_error")


def _decode_tokens(request: BatchRequest, place: int, model: Model) -> int:
    """Tokens that a prompt may generate."""
    room = model.max_model_len - len(request.prompts[place].token_ids)
    return request.call.params.n * min(request.call.params.max_tokens or room, max(room, 1))
