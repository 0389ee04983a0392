"""The number of requests that a pool is said to hold is the number that a scheduler admits."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_scheduler import make_scheduler, make_sequence

from jaxserve.kv.layout import KVLayout
from jaxserve.scheduler.admission import AdmissionRule
from jaxserve.scheduler.policies import POLICIES

POLICIES_OF_ONE_STEP = [name for name, policy in POLICIES.items() if policy.chunk != "timed"]
"""With a budget for it, these admit in one step whatever fits. (The other policy's chunks are as
long as time allows; its admissions go by the same rule.)"""


@pytest.mark.parametrize("policy", POLICIES_OF_ONE_STEP)
@given(
    page_size=st.integers(1, 9),
    capacity=st.integers(1, 60),
    tokens=st.integers(2, 80),
    watermark=st.sampled_from([0.0, 0.01, 0.3]),
    max_num_seqs=st.integers(1, 12),
    data=st.data(),
)
@example(page_size=4, capacity=16, tokens=17, watermark=0.01, max_num_seqs=12, data=None)
def test_as_many_requests_run_at_once_as_the_rule_says(
    policy, page_size, capacity, tokens, watermark, max_num_seqs, data
):
    scheduler = make_scheduler(
        num_pages=1 + capacity,
        page_size=page_size,
        policy=policy,
        watermark=watermark,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=2000,
        max_prefill_tokens=2000,
        max_model_len=tokens,
    )
    rule = AdmissionRule.of(scheduler.config, capacity, KVLayout(page_size))
    promised = rule.num_at_once(tokens)
    pages = -(-(tokens - 1) // page_size)
    if pages > capacity:
        assert promised == 0
        return
    # However many of the last page's tokens are generated, the pages are as many.
    shortest = (pages - 1) * page_size + 1
    prompt = tokens - 1 if data is None else data.draw(st.integers(shortest, tokens - 1))
    for seq_id in range(max_num_seqs + 1):
        scheduler.add(make_sequence(seq_id, prompt, max_tokens=tokens - prompt))
    scheduler.schedule()
    assert scheduler.num_running == promised
    assert scheduler.num_waiting == max_num_seqs + 1 - promised
    if policy == "orca":
        assert promised == min(capacity // pages, max_num_seqs)
