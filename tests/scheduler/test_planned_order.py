"""The planned order: every prompt once, each shared prefix computed once and let go of at the end.

What is computed is bounded by the optimum of one level of sharing, `computed_tokens`, and at most
`max(1, page_size // 8)` tokens more for each prompt that does not compute its group's prefix. To
a page of which fewer tokens are known than that, the manager copies nothing; and of a prompt that
is all prefix the last token is computed, to go on from.

That holds where nothing is preempted or evicted while it is pinned, for which room for twice what
can run suffices: a group's leader is admitted only when the prompts before it run or wait for a
leader that does, so no more prefixes are held at once than sequences run.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from itertools import chain

import pytest
from group_costs import computed_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Run, linear_times, simulate
from tiny_engines import CONTEXT, LONGEST
from workloads import Job

from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import SharedPrefix
from jaxserve.core.steps.plan import StepPlan
from jaxserve.kv.invariants import check_invariants
from jaxserve.kv.manager import KVManager
from jaxserve.kv.pages import PagePool
from jaxserve.scheduler.prefix_groups import plan_prefix_groups, planned_order
from jaxserve.scheduler.scheduler import Scheduler, SchedulerConfig

ROWS, PREFILL = 3, 24


@st.composite
def prompt_lists(draw: st.DrawFn) -> list[list[int]]:
    """Prompts that begin alike: words over two letters, letter `k` stretched to a run."""
    words = draw(
        st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), min_size=1, max_size=10)
    )
    runs = draw(st.lists(st.integers(1, 25), min_size=4, max_size=4))
    return [
        list(chain.from_iterable([letter] * run for letter, run in zip(word, runs)))
        for word in words
    ]


@dataclasses.dataclass
class Served:
    """How a planned list was served: `computed[prefix][position]` counts how often a member of the
    prefix's group computed this position."""

    run: Run
    kv: KVManager
    prefixes: list[SharedPrefix]
    computed: dict[SharedPrefix, Counter[int]]


def pool_for(prompts: list[list[int]], outputs: list[int], page_size: int) -> PagePool:
    """Twice what can run, and a page to spare for admissions and for the trash."""
    longest = max(len(prompt) + output for prompt, output in zip(prompts, outputs))
    pages = 2 * ROWS * -(-longest // page_size)
    return PagePool(pages + pages // 50 + 3, page_size)


def config_for(policy: str) -> SchedulerConfig:
    prefill = PREFILL if policy in ("sarathi", "splitfuse") else CONTEXT
    return SchedulerConfig(
        policy=policy,
        max_num_seqs=ROWS,
        max_num_batched_tokens=ROWS + prefill,
        max_prefill_tokens=prefill,
        max_model_len=CONTEXT,
        min_chunk_tokens=8,
    )


def serve(
    prompts: list[list[int]],
    outputs: list[int],
    page_size: int,
    pool: PagePool,
    policy: str = "sarathi",
    abort_us: dict[int, int] | None = None,
    forgetful: bool = False,
) -> Served:
    """Serves prompts in the planned order, all there from the start.

    A `forgetful` pool loses after each step whatever is neither in use nor pinned.
    """
    order = [
        Job(
            0,
            len(prompts[index]),
            outputs[index],
            max_tokens=outputs[index],
            abort_us=(abort_us or {}).get(index),
            token_ids=prompts[index],
            shared_prefix=shared,
        )
        for index, shared in planned_order(prompts, outputs, page_size)
    ]
    kv = KVManager(pool)
    computed: dict[SharedPrefix, Counter[int]] = defaultdict(Counter)

    def watch(scheduler: Scheduler, plan: StepPlan) -> None:
        check_invariants(kv, scheduler.tables.values())
        for chunk in plan.prefills:
            for prefix in chunk.seq.prefixes:
                computed[prefix].update(range(chunk.start, chunk.start + chunk.num_tokens))
        if forgetful:
            on_device = [node for node in kv.tree if node.pins and node.device is not None]
            kv.evict(pool.num_cached - sum(not pool.refs(node.device) for node in on_device))

    run = simulate(order, config_for(policy), kv, linear_times(10, 1), on_step=watch)
    prefixes = list(dict.fromkeys(job.shared_prefix for job in order if job.shared_prefix))
    return Served(run, kv, prefixes, computed)


def assert_let_go(served: Served) -> None:
    """Nothing is held once all have ended."""
    assert served.kv.pool.num_used == 0
    assert not any(node.pins for node in served.kv.tree)
    assert all(prefix.num_members == 0 for prefix in served.prefixes)


# The order


@settings(max_examples=100, deadline=None)
@given(prompts=prompt_lists(), page_size=st.integers(1, 20))
def test_every_prompt_comes_once_and_groups_stay_together(prompts, page_size):
    order = list(planned_order(prompts, [1] * len(prompts), page_size))
    assert sorted(index for index, _ in order) == list(range(len(prompts)))
    groups = plan_prefix_groups(prompts, None, min_prefix_tokens=page_size)
    assert [index for index, _ in order] == [m for group in groups for m in group.members]
    shared_of = dict(order)
    for group in groups:
        (shared,) = {shared_of[index] for index in group.members}
        if shared is None:
            assert group.prefix_tokens == 0
            continue
        assert shared.num_tokens == group.prefix_tokens >= page_size
        assert len({tuple(prompts[index][: shared.num_tokens]) for index in group.members}) == 1
    shared = [prefix for _, prefix in order if prefix is not None]
    assert len(set(shared)) == sum(bool(group.prefix_tokens) for group in groups)


def test_no_prompts_have_no_order():
    assert list(planned_order([], [], 16)) == []


# As the scheduler runs it


@settings(max_examples=60, deadline=None)
@given(prompts=prompt_lists(), page_size=st.sampled_from([1, 4, 16]), data=st.data())
def test_computes_the_optimum_and_little_more(prompts, page_size, data):
    counts = st.lists(st.integers(1, 8), min_size=len(prompts), max_size=len(prompts))
    outputs = data.draw(counts)
    served = serve(prompts, outputs, page_size, pool_for(prompts, outputs, page_size))
    assert served.run.num_preemptions == 0
    groups = plan_prefix_groups(prompts, outputs, min_prefix_tokens=page_size)
    slack = max(1, page_size // 8)
    followers = sum(len(group.members) - 1 for group in groups)
    assert served.run.num_prefill_tokens <= computed_tokens(prompts, groups) + slack * followers
    for prefix in served.prefixes:
        counts = served.computed[prefix]
        assert all(counts[position] <= 1 for position in range(prefix.num_tokens - slack))
    assert_let_go(served)


def contexts(count: int, members: int) -> list[list[int]]:
    """Prompts of 50 tokens, 42 of them shared by the members of a group, in turn."""
    return [
        [1 + group] * 42 + [100 + count * member + group] * 8
        for member in range(members)
        for group in range(count)
    ]


@pytest.mark.parametrize("policy", ["sarathi", "splitfuse", "vllm", "orca"])
def test_each_prefix_is_computed_once_where_a_cache_alone_forgets_it(policy):
    prompts = contexts(count=12, members=5)
    outputs = [4] * len(prompts)
    served = serve(prompts, outputs, 4, pool_for(prompts, outputs, 4), policy)
    assert served.run.num_prefill_tokens == 12 * 42 + 60 * 8
    assert len(served.prefixes) == 12
    for prefix in served.prefixes:
        assert [served.computed[prefix][position] for position in range(42)] == [1] * 42
    assert_let_go(served)
    jobs = [Job(0, 50, 4, 4, token_ids=prompt) for prompt in prompts]
    kv = KVManager(pool_for(prompts, outputs, 4))
    as_given = simulate(jobs, config_for(policy), kv, linear_times(10, 1))
    assert as_given.num_prefill_tokens > 2 * served.run.num_prefill_tokens


def test_a_prefix_outlives_its_leader_until_the_next_of_its_group_has_room():
    """A long prompt takes all room from the step after the one in which the leader computes the end
    of the prefix and its only answer, and the pool forgets what is not pinned."""
    prompts = [[1] * 50 + [2 + member] * 6 for member in range(5)] + [[99] * 100]
    outputs = [1] * len(prompts)
    pool = pool_for(prompts, outputs, 4)
    served = serve(prompts, outputs, 4, pool, forgetful=True)
    assert served.run.num_prefill_tokens == 50 + 5 * 6 + 100
    assert_let_go(served)


def test_the_next_in_line_leads_when_the_client_of_the_leader_leaves():
    prompts = contexts(count=1, members=4)
    served = serve(prompts, [4] * 4, 4, pool_for(prompts, [4] * 4, 4), abort_us={0: 30})
    assert [len(tokens) for tokens in served.run.token_us] == [0, 4, 4, 4]
    computed = served.computed[served.prefixes[0]]
    assert [computed[position] for position in range(42)] == [1] * 42  # By two of them.
    assert_let_go(served)


@settings(max_examples=30, deadline=None)
@given(prompts=prompt_lists(), data=st.data())
def test_in_a_pool_too_tight_for_what_runs_all_end_and_nothing_stays_held(prompts, data):
    outputs = [8] * len(prompts)
    longest = -(-max(len(prompt) + 8 for prompt in prompts) // 4)
    pool = PagePool(longest + data.draw(st.integers(1, 10)) + 1, 4)
    served = serve(prompts, outputs, 4, pool)
    assert all(len(tokens) == 8 for tokens in served.run.token_us)
    assert_let_go(served)


# As LLM.generate uses it


@pytest.fixture
def continued(llama) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts within prompts, each a known answer's beginning, in turn; and how each goes
    on, as the oracle has it."""
    cases = [
        (llama.prompts[base] + llama.answers[base][:known], llama.answers[base][known:])
        for known in range(0, 10, 2)
        for base in (9, 10, 11)
    ]
    return [prompt for prompt, _ in cases], [answer for _, answer in cases]


def test_generate_computes_less_for_the_same_answers_in_the_order_of_the_prompts(llm, continued):
    prompts, answers = continued
    params = SamplingParams(temperature=0, max_tokens=LONGEST // 2, ignore_eos=True)

    def cached_tokens(**options) -> int:
        llm.reset_prefix_cache()
        outputs = llm.generate(prompts, params, use_tqdm=False, **options)
        for output, prompt, answer in zip(outputs, prompts, answers):
            assert list(output.prompt_token_ids) == prompt
            assert list(output.outputs[0].token_ids) == answer[: params.max_tokens]
        return sum(output.metrics.cached_tokens for output in outputs)

    assert max(map(len, prompts)) + params.max_tokens <= CONTEXT
    in_given_order = cached_tokens(priority=[0] * len(prompts))
    planned = cached_tokens()
    total = sum(map(len, prompts))
    groups = plan_prefix_groups(prompts, None, min_prefix_tokens=llm.plan().config.page_size)
    saved = total - computed_tokens(prompts, groups)
    assert planned > in_given_order
    assert planned >= 0.95 * saved
    assert not any(node.pins for node in llm.engine.kv.tree)
