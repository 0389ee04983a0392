"""The requests of a router whose output is not complete: where each runs, and what it has got."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import random
from collections.abc import Sequence as SequenceOf

from jaxserve.cluster.kept_kv import KeptKV
from jaxserve.cluster.policies.copies import CopyCounts
from jaxserve.cluster.policies.dispatch import Demand, dispatch
from jaxserve.cluster.policies.prefixes import page_hashes
from jaxserve.cluster.policies.pulls import Pulls, plan_pull
from jaxserve.cluster.prefix_pull import PrefixPull
from jaxserve.cluster.replicas.replica_client import ignore_lost
from jaxserve.cluster.replicas.routed_replica import OpenRequest, RoutedReplica, Submission
from jaxserve.cluster.routed_request import RoutedRequest
from jaxserve.cluster.staged_copy import StagedCopy
from jaxserve.cluster.tasks import Tasks
from jaxserve.core.commands import AddRequest
from jaxserve.core.errors import (
    EngineClosedError,
    JaxserveError,
    OverloadedError,
    ReplicaLostError,
    RequestError,
)
from jaxserve.core.requests.outputs import RequestOutput
from jaxserve.engine.output_queue import OutputDispatcher, Update
from jaxserve.engine.snapshot.requests import RequestSnapshot

MAX_LOSSES = 3
"""A request with which so many replicas were lost, without a new token between, fails: it may be
what ends them."""

RETRY_S = 0.5
"""How long a request waits that a replica is too busy for, after another one had accepted it."""

_log = logging.getLogger(__name__)


class OpenRequests:
    """Dispatches requests to replicas, and hands their output to the clients.

    Attributes:
        page_size: of every replica; set it before the first request.
        caches_prefixes: whether replicas do.
        num_redispatched: requests dispatched again, of lost replicas.
        num_moved: requests moved with their KV.
        shares_prefixes: whether replicas pull prefixes that others have cached.
        num_pulled_tokens: of prompts, whose KV was pulled from another replica.
        copies: what was copied of requests that move.
        due: set when a request may leave a replica that only prefills.
    """

    page_size: int
    caches_prefixes = True
    shares_prefixes = True

    def __init__(self, replicas: SequenceOf[RoutedReplica], tasks: Tasks, seed: int) -> None:
        """`replicas` may change."""
        self.num_redispatched = 0
        self.num_moved = 0
        self.copies = CopyCounts()
        self.due = asyncio.Event()
        self._replicas = replicas
        self._tasks = tasks
        self._open: dict[str, OpenRequest] = {}
        self._unrouted: list[OpenRequest] = []
        self._dispatcher = OutputDispatcher()
        self._seeds = random.Random(seed)
        self._sends = itertools.count()
        self._pulls = Pulls()

    def admit(self, submission: Submission, added: SequenceOf[AddRequest]) -> None:
        """Dispatch the requests of one submission. One of them that is refused ends the others."""
        for number, each in enumerate(added):
            if each.request_id in self._open:
                error = RequestError(
                    f"request_id {each.request_id!r} is in use by an unfinished request."
                )
                self._refuse(submission, error)
                return
            params = each.params
            if params.seed is None:
                params = dataclasses.replace(params, seed=self._seeds.getrandbits(63))
            each = dataclasses.replace(each, params=params, seed=params.seed)
            request = OpenRequest(RoutedRequest(each, self._demand(each)), submission, number)
            self._open[each.request_id] = request
            submission.requests.append(request)
            self._route(request)

    @property
    def num_pulled_tokens(self) -> int:
        return self._pulls.num_tokens

    def abort(self, request_id: str) -> None:
        request = self._open.get(request_id)
        if request is not None:
            request.abort()
            if request.replica is not None:
                self._tasks.spawn(ignore_lost(request.replica.client.abort(request.sent_as)))

    def abandon(self, submission: Submission) -> None:
        """Abort the requests of a submission whose output is not read."""
        for request in submission.requests:
            if not self._is_open(request):
                continue  # It has ended.
            replica, name = request.replica, request.sent_as
            self._end(request)
            request.abort()
            if replica is not None:
                self._tasks.spawn(ignore_lost(replica.client.abort(name)))

    def route_waiting(self) -> None:
        """Dispatch the requests that waited until a replica was ready."""
        waiting, self._unrouted = self._unrouted, []
        for request in waiting:
            self._route(request)

    def redispatch(self, lost: SequenceOf[OpenRequest]) -> None:
        """Dispatch the requests of a lost replica to others, with the tokens that they have."""
        for request in lost:
            request.leave()
            request.immovable = False
            request.routed.lose()
            if request.routed.num_losses >= MAX_LOSSES:
                name = request.routed.added.request_id
                self._fail(
                    request,
                    EngineClosedError(
                        f"request {name!r} was given up after {MAX_LOSSES} replicas were lost with "
                        "it, and may be what ends them; before you send it again, see the server's "
                        "log for why each was lost."
                    ),
                )
            else:
                self.num_redispatched += 1
                self._route(request)
        self._dispatcher.send()

    def hold(self, left: SequenceOf[OpenRequest]) -> None:
        """The process of a replica is replaced, which resumes these requests."""
        for request in left:
            request.hold()

    async def resume_in(
        self, replica: RoutedReplica, request: OpenRequest, kept: KeptKV | None
    ) -> bool:
        """Send a request that was held to a replica, with the KV that was kept of it, if any; or
        anywhere, if that replica is lost. Whether KV is there."""
        if not self._is_open(request):
            return False
        name = self._next_name(request)
        num_tokens = 0 if kept is None else await kept.stage(replica, name)
        is_open = self._is_open(request)
        if is_open and replica.state == "ready" and num_tokens:
            self._send(request, replica, name, request.routed.to_resume(name))
            return True
        if kept is not None:
            await ignore_lost(replica.client.unstage_request(name))
            is_open = self._is_open(request)
        if is_open and replica.state == "ready":
            name = self._next_name(request)
            self._send(request, replica, name, request.routed.to_send(name))
        elif is_open:
            self._route(request)
        return False

    def _is_open(self, request: OpenRequest) -> bool:
        return self._open.get(request.routed.added.request_id) is request

    def deliver(self, replica: RoutedReplica, updates: SequenceOf[tuple[str, Update]]) -> None:
        """Hand the updates of a replica to the clients of its requests."""
        for name, update in updates:
            request = replica.requests.get(name)
            if request is None:
                if isinstance(update, RequestOutput) and name in replica.moved:
                    replica.moved.pop(name).note(update)
                continue
            self._accept(request)
            if isinstance(update, RequestOutput):
                request.note(update)
                self._end(request, update)
                self._put(request, _for_client(request, update))
                continue
            deltas = request.routed.receive(update)
            if not deltas:
                continue
            if replica.load.role == "prefill":
                self.due.set()
            replica.load.grow(name, sum(len(delta.token_ids) for delta in deltas))
            if request.submission.queue.wants_deltas:
                self._put(request, deltas)
        self._dispatcher.send()

    def move(self, request: OpenRequest, destination: RoutedReplica) -> asyncio.Task[None]:
        """Begin to move a running request to another replica, with its KV; returns the task.

        It runs on while its KV is copied, see `StagedCopy`. Then its tokens go to the destination,
        which computes the KV of those that came since the last stage, all in one step, and goes on;
        so a failure before that changes nothing.
        """
        assert request.replica is not None
        name, load = self._next_name(request), destination.load
        load.add(name, request.routed.demand)  # Its pages are taken from now on.
        request.moving = True
        copy = StagedCopy(request, destination, name, self.page_size, self.copies)

        async def move(source: RoutedReplica, sent_as: str) -> None:
            copied = await copy.run()
            load.remove(name)
            request.moving = False
            if not copied or not copy.is_wanted:
                self.due.set()  # Perhaps it moves elsewhere.
                await ignore_lost(destination.client.unstage_request(name))
                return
            self._leave(request)
            request.routed.rewind()
            self.num_moved += 1
            self.copies.left += copy.num_left
            source.moved[sent_as] = request
            self._send(request, destination, name, request.routed.to_resume(name))
            await ignore_lost(source.client.abort(sent_as))

        return self._tasks.spawn(move(request.replica, request.sent_as))

    def close(self, error: EngineClosedError) -> None:
        """End all requests with an error."""
        for request in self._open.values():
            self._dispatcher.put(request.submission.queue, 0, error)
        self._dispatcher.send()

    def _demand(self, added: AddRequest) -> Demand:
        hashes = self._page_hashes(added, added.token_ids, ()) if self.caches_prefixes else None
        return Demand.of(
            len(added.token_ids), hashes, self.page_size, added.params.n, added.priority
        )

    def _page_hashes(
        self, added: AddRequest, token_ids: SequenceOf[int], known: SequenceOf[bytes]
    ) -> tuple[bytes, ...]:
        """Hashes of the pages of a request whose tokens are these; `known` are the first ones."""
        adapter, salt = added.lora_request, added.cache_salt
        return page_hashes(token_ids, self.page_size, added.tenant, salt, adapter, known)

    def _route(self, request: OpenRequest) -> None:
        """Send a request to a replica, or have it wait until one is ready."""
        index = dispatch([replica.load for replica in self._replicas], request.routed.demand)
        if index is None:
            self._unrouted.append(request)
            return
        name, pull = self._next_name(request), self._pull(request, index)
        self._send(request, self._replicas[index], name, request.routed.to_send(name), pull)

    def _pull(self, request: OpenRequest, index: int) -> PrefixPull | None:
        """The pull of a prefix that the request's replica has not cached, but another one has."""
        if not self.shares_prefixes or request.routed.added.lora_request is not None:
            return None  # A prefix of an adapter is of the digest that the engine gives it.
        pull = plan_pull([replica.load for replica in self._replicas], index, request.routed.demand)
        if pull is None:
            return None
        return PrefixPull(
            self._replicas[pull.source], self._replicas[index], pull, self.page_size, self._pulls
        )

    def _next_name(self, request: OpenRequest) -> str:
        """An id for the replica that it is sent to next."""
        return f"{request.routed.added.request_id}~{next(self._sends)}"

    def _send(
        self,
        request: OpenRequest,
        replica: RoutedReplica,
        name: str,
        sent: AddRequest | RequestSnapshot,
        pull: PrefixPull | None = None,
    ) -> None:
        request.enter(replica, name)
        replica.requests[name] = request
        replica.load.add(name, request.routed.demand)
        if replica.load.role == "prefill":
            self.due.set()
        if pull is None:
            self._tasks.spawn(self._submit(request, replica, name, sent))
        else:
            self._tasks.spawn(self._pull_and_submit(pull, request, replica, name, sent))

    async def _pull_and_submit(
        self,
        pull: PrefixPull,
        request: OpenRequest,
        replica: RoutedReplica,
        name: str,
        sent: AddRequest | RequestSnapshot,
    ) -> None:
        await pull.run(request)
        if replica.requests.get(name) is not request:
            return  # Its replica has been lost meanwhile, or its client has left.
        if replica.state == "ready" or request.routed.aborted:
            await self._submit(request, replica, name, sent)
        else:
            self._leave(request)
            self._route(request)

    def _leave(self, request: OpenRequest) -> None:
        """A request is no longer with its replica."""
        replica = request.leave()
        assert replica is not None
        del replica.requests[request.sent_as]
        replica.load.remove(request.sent_as)

    async def _submit(
        self,
        request: OpenRequest,
        replica: RoutedReplica,
        name: str,
        sent: AddRequest | RequestSnapshot,
    ) -> None:
        ended = replica.ended
        try:
            await replica.client.submit(sent)
        except (ReplicaLostError, EngineClosedError):  # Perhaps only this message was lost.
            if not ended.done():
                ended.set_result(ReplicaLostError("a request could not be sent to it"))
            return
        except OverloadedError as error:
            if not request.accepted:
                self._refuse(request.submission, error)
                return
            await asyncio.sleep(RETRY_S)
            if replica.requests.get(name) is request:
                self._tasks.spawn(self._submit(request, replica, name, sent))
            return
        except Exception as error:
            if request.sent_as == name:
                self._refuse(request.submission, error)
            return
        if request.routed.aborted or request.sent_as != name:  # It runs elsewhere by now.
            await ignore_lost(replica.client.abort(name))
        self._accept(request)

    def _accept(self, request: OpenRequest) -> None:
        """A replica has taken a request: it says so, or sends an update, whichever comes first."""
        if request.accepted:
            return
        request.accepted = True
        if request.replica is not None and request.replica.load.role == "prefill":
            self.due.set()  # From now on it may move.
        submission = request.submission
        submission.num_waited_for -= 1
        if not submission.num_waited_for:
            for number, update in [(0, []), *submission.held]:
                self._dispatcher.put(submission.queue, number, update)
            self._dispatcher.send()

    def _put(self, request: OpenRequest, update: Update) -> None:
        submission = request.submission
        if submission.num_waited_for:
            submission.held.append((request.number, update))
        else:
            self._dispatcher.put(submission.queue, request.number, update)

    def _end(self, request: OpenRequest, output: RequestOutput | None = None) -> None:
        """A request ends; the pages of its output are cached."""
        added = request.routed.added
        del self._open[added.request_id]
        replica = request.replica
        if replica is None:
            with contextlib.suppress(ValueError):
                self._unrouted.remove(request)
            return
        self._leave(request)
        if output is None:
            return
        replica.num_finished += 1
        known = request.routed.demand.hashes
        for choice in output.outputs if self.caches_prefixes else ():
            token_ids = [*added.token_ids, *choice.token_ids[:-1]]  # The last has no KV.
            replica.load.cached.add(self._page_hashes(added, token_ids, known))

    def _fail(self, request: OpenRequest, error: JaxserveError) -> None:
        self._end(request)
        self._dispatcher.put(request.submission.queue, request.number, error)

    def _refuse(self, submission: Submission, error: Exception) -> None:
        """None of its prompts is accepted."""
        self.abandon(submission)
        self._dispatcher.put(submission.queue, 0, error)
        self._dispatcher.send()


def _for_client(request: OpenRequest, output: RequestOutput) -> RequestOutput:
    """A replica's output as that of the request which the client has sent."""
    cached_tokens, added = request.cached_tokens or 0, request.routed.added
    return dataclasses.replace(
        output,
        request_id=added.request_id,
        prompt=added.prompt,
        prompt_token_ids=tuple(added.token_ids),
        metrics=dataclasses.replace(output.metrics, cached_tokens=cached_tokens),
    )
