"""The states of a sequence, and the transitions between them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import jaxserve
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence, SequenceState

TRANSITIONS = {
    ("WAITING", "ADMITTED"),
    ("ADMITTED", "RUNNING"),
    ("ADMITTED", "WAITING"),
    ("RUNNING", "WAITING"),
    ("RUNNING", "DRAINING"),
    *((state, "FINISHED") for state in ("WAITING", "ADMITTED", "RUNNING", "DRAINING")),
}


def sequence(state: SequenceState) -> Sequence:
    seq = Sequence(0, "a", 0, [1, 2, 3], SamplingParams(), arrival_us=0)
    seq.state = state
    return seq


@pytest.mark.parametrize(
    "before, after", list(itertools.product(SequenceState, repeat=2)), ids=lambda state: state.name
)
def test_only_these_transitions_exist(before, after):
    seq = sequence(before)
    if (before.name, after.name) in TRANSITIONS:
        seq.transition(after)
        assert seq.state is after
    else:
        with pytest.raises(ValueError, match=f"sequence 0 cannot go from .*{before.name}"):
            seq.transition(after)
        assert seq.state is before


def test_a_preempted_sequence_waits_and_has_started():
    seq = sequence(SequenceState.WAITING)
    seq.transition(SequenceState.ADMITTED)
    assert seq.active and not seq.started
    seq.transition(SequenceState.WAITING)
    assert seq.waiting and not seq.started
    for state in (SequenceState.ADMITTED, SequenceState.RUNNING, SequenceState.WAITING):
        seq.transition(state)
    assert seq.waiting and seq.started and not seq.active


def test_one_module_changes_the_states_of_sequences():
    """And snapshots, which restore sequences that no scheduler has yet."""
    package = Path(jaxserve.__file__).parent
    changing = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "transition(SequenceState." in path.read_text()
    }
    assert changing == {"scheduler/lifecycle.py", "engine/snapshot/requests.py"}
