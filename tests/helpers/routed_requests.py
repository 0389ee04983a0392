"""Requests as a router has them, served by engines that are lost."""

from __future__ import annotations

import dataclasses
import itertools

from jaxserve.cluster.policies.dispatch import Demand
from jaxserve.cluster.routed_request import RoutedRequest
from jaxserve.core.commands import AddRequest
from jaxserve.core.requests.outputs import Delta, RequestOutput
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.engine.output_queue import merge
from jaxserve.engine.snapshot.requests import RequestSnapshot

_ids = itertools.count()


def routed(prompt: list[int], params: SamplingParams) -> RoutedRequest:
    params = dataclasses.replace(params, seed=5)
    added = AddRequest(
        request_id="it",
        prompt=None,
        token_ids=prompt,
        params=params,
        priority=None,
        tenant=None,
        cache_salt=None,
        seed=5,
        first_seq_id=0,
    )
    return RoutedRequest(added, Demand((), len(prompt), params.n))


def run(
    engine: Engine, request: RoutedRequest, steps: int | None = None, every: int = 1
) -> tuple[list[Delta], RequestOutput | None]:
    """What the client of a request receives of an engine in so many steps, and the output."""
    sent = request.to_send(f"it~{next(_ids)}")
    if isinstance(sent, RequestSnapshot):
        live = engine.migration.resume_request(sent)
    else:
        live = engine.add(sent.request_id, sent.token_ids, sent.params)
    received = []
    for step in itertools.count(1):
        if live.finished or step == steps:
            break
        engine.step()
        if step % every == 0:
            received += request.receive(merge(live.take_deltas()))
    if not live.finished:
        engine.abort(live.request_id)
        while engine.has_work:
            engine.step()
        return received, None  # The rest is lost with the engine.
    received += request.receive(merge(live.take_deltas()))
    output = engine.output(live)
    while engine.has_work:
        engine.step()
    return received, output
