"""Hosts that read one log do the same, and notice when they would not."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.commands import Abort, AddRequest, ResetPrefixCache, SetPriority
from jaxserve.core.errors import DistributedError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import SharedPrefix
from jaxserve.core.steps.plan import StepPlan
from jaxserve.engine.replication.log import ReplicatedLog


@dataclasses.dataclass
class Memory:
    """A channel within this process."""

    host: int
    entries: dict[int, bytes]

    def publish(self, number, entry):
        self.entries[number] = entry

    def receive(self, number, wait):
        return self.entries[number]


@pytest.fixture
def hosts():
    """The ends of host 0 and of another."""
    return logs()


def logs():
    entries = {}
    return ReplicatedLog(Memory(0, entries)), ReplicatedLog(Memory(1, entries))


commands = st.lists(
    st.one_of(
        st.builds(Abort, st.text(max_size=5)),
        st.builds(SetPriority, st.text(max_size=5), st.integers(-3, 3)),
        st.just(ResetPrefixCache()),
    ),
    max_size=4,
)


@given(st.lists(st.tuples(commands, st.booleans(), st.integers(0, 10**9)), max_size=40))
def test_commands_come_in_order_and_are_known_where_they_were_given(steps):
    first, other = logs()
    for given_here, also_there, now_us in steps:
        for command in given_here:
            first.add_command(command)
            if also_there:
                other.add_command(command)
        for log in (first, other):
            log.add_tokens([now_us])
        mine, done = first.next_entry(now_us)
        theirs, heard = other.next_entry(now_us + 5)
        assert mine == theirs and mine.now_us == now_us
        assert done == [(command, True) for command in given_here]
        assert heard == [(command, also_there) for command in given_here]


def test_an_addition_is_the_same_on_the_other_side(hosts):
    first, other = hosts
    prefix = SharedPrefix(7)
    added = AddRequest(
        request_id="a request",
        prompt=None,
        token_ids=[3, 1, 4],
        params=SamplingParams(temperature=0.5, logit_bias={5: -2.0}, stop=["\n"], max_tokens=9),
        priority=None,
        tenant="a tenant",
        cache_salt=None,
        seed=2**63 - 1,
        first_seq_id=12,
        shared_prefix=prefix,
        arrival_us=17,
    )
    for _ in range(2):
        first.add_command(added)
        first.next_entry(0)
    (_, [(read, given_here)]), (_, [(again, _)]) = other.next_entry(0), other.next_entry(0)
    assert read == again == added and not given_here
    assert read.arrival_us == 17
    assert read.shared_prefix.num_tokens == 7
    assert read.shared_prefix is again.shared_prefix


def test_a_command_that_host_0_was_not_given(hosts):
    first, other = hosts
    other.add_command(Abort("only here"))
    first.next_entry(0)
    with pytest.raises(DistributedError, match=r"host 1 .* step 0: .*0 commands.*only here"):
        other.next_entry(0)


@pytest.mark.parametrize("when", ["later", "at the end"])
def test_tokens_that_differ(hosts, when):
    first, other = hosts
    for log in hosts:
        log.add_plan(StepPlan())
        log.next_entry(0)
    first.add_tokens([1, 2])
    other.add_tokens([1, 3])
    with pytest.raises(DistributedError, match="digest"):
        if when == "at the end":
            first.end(checked=True)
            other.next_entry(0)
        for _ in range(20):
            first.next_entry(0)
            other.next_entry(0)


def test_a_step_that_only_host_0_read(hosts):
    first, other = hosts
    first.observe_step_time(100)
    first.next_entry(0)
    with pytest.raises(DistributedError, match="host 0 has 1 steps read, this host has 0"):
        other.next_entry(0)


def test_the_end(hosts):
    first, other = hosts
    first.end(checked=True)
    first.end(checked=True)
    entry, heard = other.next_entry(0, wait=True)
    assert entry.last and other.ended and not heard
