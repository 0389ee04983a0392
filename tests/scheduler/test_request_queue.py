"""The waiting queues: order, taking while iterating, and shares that no tenant can stretch."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from itertools import islice
from operator import attrgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence
from jaxserve.scheduler.request_queue import DECODE_WEIGHT, FairQueue, SlackQueue, WaitingQueue


def slack_queue() -> SlackQueue:
    """One whose urgency is the order of arrival."""
    return SlackQueue(attrgetter("order"))


all_queues = pytest.mark.parametrize("make_queue", [WaitingQueue, slack_queue, FairQueue])


def make_sequence(seq_id: int, tenant: str | None = None, prompt: int = 10, **fields) -> Sequence:
    return Sequence(
        seq_id=seq_id,
        request_id=f"r{seq_id}",
        index=0,
        prompt_token_ids=[7] * prompt,
        params=SamplingParams(),
        tenant=tenant,
        **{"arrival_us": seq_id} | fields,
    )


def ids(sequences) -> list[int]:
    return [seq.seq_id for seq in sequences]


def take(queue: WaitingQueue | FairQueue, seq: Sequence) -> None:
    """Does what a scheduler does to admit a sequence."""
    queue.remove(seq)
    queue.charge(seq, prefill_tokens=seq.remaining, decode_tokens=0)


@dataclasses.dataclass
class Server:
    """Admits into `rows` rows while any is free; each step samples one token of every row."""

    queue: FairQueue
    rows: int
    served: Counter = dataclasses.field(default_factory=Counter)
    admitted: list[int] = dataclasses.field(default_factory=list)
    running: list[tuple[Sequence, int]] = dataclasses.field(default_factory=list)
    outputs: dict[int, int] = dataclasses.field(default_factory=dict)

    def submit(self, seq: Sequence, output: int) -> None:
        self.outputs[seq.seq_id] = output
        self.queue.add(seq)

    def step(self) -> None:
        if len(self.running) < self.rows:
            for seq in self.queue:
                take(self.queue, seq)
                self.served[seq.tenant] += seq.remaining
                self.admitted.append(seq.seq_id)
                self.running.append((seq, self.outputs.pop(seq.seq_id)))
                if len(self.running) == self.rows:
                    break
        for seq, _ in self.running:
            self.queue.charge(seq, 0, 1)
            self.served[seq.tenant] += DECODE_WEIGHT
        for seq, left in self.running:
            if left == 1:
                self.queue.finished(seq)
        self.running = [(seq, left - 1) for seq, left in self.running if left > 1]


# What both queues do


@all_queues
def test_one_tenants_sequences_come_by_order_and_not_by_when_they_were_added(make_queue):
    queue = make_queue()
    for seq_id in (3, 0, 2):
        queue.add(make_sequence(seq_id))
    queue.add(make_sequence(9, priority=-1))
    assert ids(queue) == [9, 0, 2, 3]
    assert len(queue) == 4 and queue


@all_queues
def test_removing_takes_out_that_one_alone(make_queue):
    queue = make_queue()
    sequences = [make_sequence(seq_id) for seq_id in range(3)]
    for seq in sequences:
        queue.add(seq)
    queue.remove(sequences[1])
    assert ids(queue) == [0, 2]
    queue.remove(sequences[2])
    queue.remove(sequences[0])
    assert not queue and ids(queue) == []


@all_queues
def test_what_does_not_wait_cannot_be_removed(make_queue):
    queue = make_queue()
    with pytest.raises(ValueError, match="sequence 5 is not waiting"):
        queue.remove(make_sequence(5))
    for seq_id in (4, 6):
        queue.add(make_sequence(seq_id))
    for stranger in (5, 6, 7):
        with pytest.raises(ValueError, match=f"sequence {stranger} is not waiting"):
            queue.remove(make_sequence(stranger))
    assert ids(queue) == [4, 6]


@all_queues
@given(data=st.data())
def test_every_sequence_is_offered_once_in_any_order_of_removal(make_queue, data):
    queue = make_queue()
    tenants = data.draw(st.lists(st.sampled_from([None, "a", "b", "c"]), max_size=12))
    for seq_id, tenant in enumerate(tenants):
        queue.add(make_sequence(seq_id, tenant))
    offered, left = [], []
    for seq in queue:
        offered.append(seq.seq_id)
        if data.draw(st.booleans()):
            take(queue, seq)
        else:
            left.append(seq.seq_id)
    assert sorted(offered) == list(range(len(tenants)))
    assert sorted(ids(queue)) == sorted(left)
    assert len(queue) == len(left)


@all_queues
def test_a_preempted_sequence_returns_to_its_place(make_queue):
    queue = make_queue()
    sequences = [make_sequence(seq_id) for seq_id in range(3)]
    for seq in sequences:
        queue.add(seq)
    take(queue, sequences[0])
    assert ids(queue) == [1, 2]
    queue.add(sequences[0])
    assert ids(queue) == [0, 1, 2]


@all_queues
def test_the_first_few_are_to_be_had_without_the_rest(make_queue):
    queue = make_queue()
    for seq_id in range(100):
        queue.add(make_sequence(seq_id))
    first = []
    for seq in islice(queue, 3):
        take(queue, seq)
        first.append(seq.seq_id)
    assert first == [0, 1, 2]
    assert len(queue) == 97


# Urgency


@settings(deadline=None)
@given(
    prompts=st.lists(st.integers(1, 5000), min_size=1, max_size=20),
    taken=st.sets(st.integers(0, 19)),
    now=st.integers(0, 10_000),
)
def test_the_most_urgent_class_goes_first_and_arrival_decides_within_one(prompts, taken, now):
    def urgency(seq: Sequence) -> tuple[float, tuple[int, int]]:
        return -(now - seq.arrival_us) / seq.num_prompt, seq.order

    queue = SlackQueue(urgency)
    sequences = [make_sequence(seq_id, prompt=prompt) for seq_id, prompt in enumerate(prompts)]
    for seq in sequences:
        queue.add(seq)
    for seq in sequences:
        if seq.seq_id in taken:
            take(queue, seq)
    left = [seq for seq in sequences if seq.seq_id not in taken]
    expected = []
    while left:
        first = {}  # Of each class, lengths from a power of two up to the next.
        for seq in left:
            first.setdefault(math.floor(math.log2(seq.num_prompt)), seq)
        expected.append(min(first.values(), key=urgency))
        left.remove(expected[-1])
    assert ids(queue) == ids(expected)


# Fairness


def test_tenants_take_turns_within_one_iteration():
    queue = FairQueue()
    for seq_id in range(6):
        queue.add(make_sequence(seq_id, "many"))
    queue.add(make_sequence(6, "few"))
    queue.add(make_sequence(7, "few", prompt=30))
    queue.add(make_sequence(8, "few"))
    taken = []
    for seq in queue:
        take(queue, seq)
        taken.append(seq.seq_id)
    # many 10, few 10, many 20 (the tie is for the earlier), few 40, many 30 and 40 and 50, few.
    assert taken == [0, 6, 1, 7, 2, 3, 4, 8, 5]


def test_a_sequence_passed_over_counts_nothing():
    queue = FairQueue()
    sequences = [make_sequence(seq_id, tenant) for seq_id, tenant in enumerate("aabb")]
    for seq in sequences:
        queue.add(seq)
    assert ids(queue) == [0, 1, 2, 3]
    iterator = iter(queue)
    assert next(iterator).seq_id == 0  # Passed over, and so tenant a is still served least.
    take(queue, next(iterator))
    assert ids(iterator) == [2, 3]
    assert ids(queue) == [2, 3, 0]


def test_sampled_tokens_weigh_twice():
    queue = FairQueue()
    running = {tenant: make_sequence(i, tenant) for i, tenant in enumerate("ab")}
    for i, (tenant, seq) in enumerate(running.items()):
        queue.add(seq)
        queue.add(make_sequence(10 + i, tenant))
    for seq in running.values():
        queue.remove(seq)
    queue.charge(running["a"], prefill_tokens=9, decode_tokens=0)
    queue.charge(running["b"], prefill_tokens=0, decode_tokens=5)
    assert ids(queue) == [10, 11]
    queue.charge(running["a"], prefill_tokens=0, decode_tokens=1)
    assert ids(queue) == [11, 10]


def test_sequences_without_a_tenant_are_one_tenant():
    queue = FairQueue()
    for seq_id in range(4):
        queue.add(make_sequence(seq_id))
    queue.add(make_sequence(4, "named"))
    take(queue, next(iter(queue)))
    assert next(iter(queue)).seq_id == 4


def test_priority_decides_among_a_tenants_own_and_does_not_reach_across():
    queue = FairQueue()
    for seq_id in range(2):
        queue.add(make_sequence(seq_id, "modest"))
        queue.add(make_sequence(10 + seq_id, "pushy", priority=-seq_id))
    taken = []
    for seq in queue:
        take(queue, seq)
        taken.append(seq.seq_id)
    assert taken == [0, 11, 1, 10]


requests = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=12)


@given(rows=st.integers(1, 6), light=requests, heavy=requests)
def test_two_tenants_with_a_backlog_stay_within_the_bound(rows, light, heavy):
    """Whatever their requests are: at all times, and so over any span of time."""
    server = Server(FairQueue(), rows)
    sizes = {"light": light, "heavy": heavy}
    # One prompt and the output of one batch, which for one row is the charge of one request.
    bound = max(prompt for prompt, _ in light + heavy)
    bound += DECODE_WEIGHT * rows * max(output for _, output in light + heavy)
    next_id = 0
    leads = []
    for _ in range(120):
        for tenant, ahead in (("light", rows + 1), ("heavy", 3 * rows + 1)):
            waiting = sum(seq.tenant == tenant for seq in server.queue)
            for _ in range(ahead - waiting):
                prompt, output = sizes[tenant][next_id % len(sizes[tenant])]
                server.submit(make_sequence(next_id, tenant, prompt), output)
                next_id += 1
        server.step()
        leads.append(server.served["light"] - server.served["heavy"])
    assert -bound <= min(leads) and max(leads) <= bound
    assert max(leads) - min(leads) <= 2 * bound


def test_a_hundred_times_the_requests_get_no_more_than_half():
    server = Server(FairQueue(), rows=4)
    for seq_id in range(3000):
        server.submit(make_sequence(seq_id, "heavy", prompt=20), output=5)
    for seq_id in range(3000, 3030):
        server.submit(make_sequence(seq_id, "light", prompt=20), output=5)
    while any(seq.tenant == "light" for seq in server.queue):
        server.step()
    charge = 20 + 5 * DECODE_WEIGHT
    assert server.served["light"] >= 28 * charge
    assert server.served["light"] / server.served.total() == pytest.approx(0.5, abs=0.05)


def test_without_fairness_the_same_tenant_waits_for_all_of_them():
    queue = WaitingQueue()
    for seq_id in range(100):
        queue.add(make_sequence(seq_id, "heavy"))
    queue.add(make_sequence(100, "light"))
    assert ids(queue)[-1] == 100


@pytest.mark.parametrize("idle_while_running", [False, True])
def test_time_spent_idle_earns_no_credit(idle_while_running):
    """Neither by sending nothing at all nor by having one long request run and nothing wait."""
    server = Server(FairQueue(), rows=3)
    for seq_id in range(1000):
        server.submit(make_sequence(seq_id, "busy"), output=5)
    server.submit(make_sequence(1000, "idle"), output=400 if idle_while_running else 1)
    for _ in range(200):
        server.step()
    before = server.served.copy()
    assert before["busy"] > 3 * before["idle"]
    for seq_id in range(1001, 1400):
        server.submit(make_sequence(seq_id, "idle"), output=5)
    for _ in range(100):
        server.step()
    gained = server.served - before
    assert gained["busy"] / gained.total() == pytest.approx(0.5, abs=0.05)


def test_what_one_was_served_ahead_is_not_cleared_by_leaving_and_coming_back():
    queue = FairQueue()
    greedy, patient = make_sequence(0, "greedy", prompt=500), make_sequence(1, "patient")
    queue.add(greedy)
    queue.add(patient)
    take(queue, greedy)
    queue.finished(greedy)
    queue.add(make_sequence(2, "greedy", arrival_us=0))
    for seq_id in range(3, 20):
        queue.add(make_sequence(seq_id, "patient"))
    taken = []
    for seq in queue:
        take(queue, seq)
        taken.append(seq.tenant)
    assert taken == ["patient"] * 18 + ["greedy"]


def test_a_tenant_that_joins_an_empty_queue_starts_at_the_last_service_level():
    queue = FairQueue()
    first = make_sequence(0, "first", prompt=1000)
    queue.add(first)
    take(queue, first)
    queue.finished(first)
    queue.add(make_sequence(1, "second"))
    queue.add(make_sequence(2, "first"))
    queue.add(make_sequence(3, "second"))
    taken = []
    for seq in queue:
        take(queue, seq)
        taken.append(seq.seq_id)
    assert taken == [1, 2, 3]


@given(
    st.lists(
        st.tuples(st.sampled_from("abcde"), st.integers(1, 60), st.integers(1, 9)), max_size=40
    ),
    st.integers(1, 3),
    st.sampled_from([1, 7, 10_000]),
)
def test_waiting_sequences_are_admitted_though_others_never_end(requests, rows, num_others):
    server = Server(FairQueue(), rows)
    for seq_id, (tenant, prompt, output) in enumerate(requests):
        server.submit(make_sequence(seq_id, tenant, prompt), output)
    next_id = len(requests)
    for _ in range(1500):
        if set(range(len(requests))) <= set(server.admitted):
            break
        # With 10,000 a new tenant each time.
        other = f"other{next_id % num_others}"
        server.submit(make_sequence(next_id, other, prompt=1, priority=-1), output=1)
        next_id += 1
        server.step()
    else:
        pytest.fail(f"still waiting: {ids(server.queue)[:5]}")


def test_tenants_long_gone_are_forgotten():
    server = Server(FairQueue(), rows=4)
    for seq_id in range(5000):
        server.submit(make_sequence(seq_id, f"tenant{seq_id}", prompt=1 + seq_id % 50), output=2)
        server.step()
        assert len(server.queue._accounts) <= 128
    assert len(server.admitted) > 4990


def test_a_tenant_that_only_runs_is_remembered():
    queue = FairQueue()
    running = make_sequence(0, "running")
    queue.add(running)
    take(queue, running)
    for seq_id in range(1, 200):
        seq = make_sequence(seq_id, f"tenant{seq_id}")
        queue.add(seq)
        take(queue, seq)
        queue.finished(seq)
    queue.charge(running, 0, 10_000)
    queue.add(make_sequence(300, "other"))
    queue.add(make_sequence(200, "running"))
    assert ids(queue) == [300, 200]


def test_what_one_was_served_ahead_is_remembered_until_the_others_catch_up():
    queue = FairQueue()
    greedy = make_sequence(0, "greedy", prompt=500)
    patient = [make_sequence(seq_id, "patient") for seq_id in range(1, 60)]
    for seq in (greedy, *patient):
        queue.add(seq)
    take(queue, greedy)
    queue.finished(greedy)
    take(queue, patient[0])
    for seq_id in range(100, 200):
        seq = make_sequence(seq_id, f"tenant{seq_id}", prompt=1)
        queue.add(seq)
        take(queue, seq)
        queue.finished(seq)
    queue.add(make_sequence(0, "greedy"))
    taken = []
    for seq in queue:
        take(queue, seq)
        taken.append(seq.seq_id)
    assert taken.index(0) == 49  # When the patient one has 500 too, the earlier of the two.


def test_newcomers_join_where_the_last_did_though_those_served_have_left():
    queue = FairQueue()
    for seq_id in range(3):
        queue.add(make_sequence(seq_id, "first"))
    known = [make_sequence(seq_id, "known", prompt=1000) for seq_id in (3, 4)]
    for seq in known:
        queue.add(seq)
    take(queue, known[0])
    queue.add(make_sequence(5, "second"))
    take(queue, known[1])
    queue.add(make_sequence(6, "third"))
    taken = []
    for seq in queue:
        take(queue, seq)
        taken.append(seq.seq_id)
    assert taken == [0, 1, 2, 5, 6]
