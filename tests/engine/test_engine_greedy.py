"""Greedy tokens equal the oracle's, however requests come, share steps, and lose their memory."""

from __future__ import annotations

import pytest
from exhaustive import combinations_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engines import CONTEXT, LONGEST, PROMPT_LENGTHS, Arrival, TinyModel, drive, preemptions

from jaxserve.core.events import Dispatched
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.scheduler.policies import POLICIES

FAMILIES = {
    "qwen3": {"page_size": 8, "max_num_batched_tokens": 2 + 16},
    "mistral": {"page_size": 16, "scheduler": "splitfuse"},
    "smollm3": {"page_size": 5},
    "olmo2": {"page_size": 64, "scheduler": "vllm"},
    "gemma2": {"page_size": 4, "max_num_batched_tokens": 2 + 16, "batch_invariant": True},
    "gemma3": {"page_size": 3, "program_scope": "step", "scheduler": "medha"},
    "qwen2_moe": {"page_size": 7, "scheduler": "orca"},
}
"""Members of other families than the tiny Llama, each with another page size. Mistral's window is
of 9 tokens, as is that of some of Gemma's layers; one in four layers of SmolLM3 does without
rotation. Phi-3's layers are a Llama's: tests/meshes has it."""

options = st.tuples(
    st.integers(0, len(PROMPT_LENGTHS) - 1),
    st.integers(1, LONGEST),
    st.booleans(),
    st.integers(0, 25),
    st.integers(-1, 1),
)
workloads = st.lists(options, min_size=1, max_size=10)


def check(model, engine, workload, apart=False):
    """Runs (prompt, max_tokens, ignore_eos, step, priority) requests, all greedy; `apart`, they
    share no pages."""
    arrivals = [
        Arrival(
            model.prompts[index],
            SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos),
            step,
            priority,
            f"tenant {place}" if apart else None,
        )
        for place, (index, max_tokens, ignore_eos, step, priority) in enumerate(workload)
    ]
    for output, (index, max_tokens, ignore_eos, *_) in zip(drive(engine, arrivals), workload):
        expected = model.answer(index, max_tokens, ignore_eos)
        (completion,) = output.outputs
        assert list(completion.token_ids) == expected
        ended = not ignore_eos and expected[-1] in model.config.eos_token_ids
        assert completion.finish_reason == ("stop" if ended else "length")
        assert completion.stop_reason is None


def crowd(prompt_length):
    """Requests that fit when they are admitted and no longer when they have grown."""
    return [(PROMPT_LENGTHS.index(prompt_length), LONGEST, True, 0, 0)] * 4


@pytest.mark.parametrize("scheduler", POLICIES)
@settings(max_examples=15, deadline=None)
@given(workload=workloads)
def test_any_workload_under_any_scheduler(llama, llm_for, scheduler, workload):
    check(llama, llm_for(scheduler).engine, workload)


@pytest.mark.parametrize("scheduler", POLICIES)
def test_running_out_of_pages(llama, llm_for, scheduler):
    engine = llm_for(scheduler).engine
    before = preemptions(engine)
    check(llama, engine, crowd(33), apart=True)
    grows = POLICIES[scheduler].pages == "grow"
    assert (preemptions(engine) > before) == grows


@pytest.mark.parametrize("scheduler", POLICIES)
def test_every_prompt_at_once(llama, llm_for, scheduler):
    """More requests than rows, and an end of text within some."""
    everything = [(index, LONGEST, False, 0, 0) for index in range(len(PROMPT_LENGTHS))]
    lengths = [len(llama.answer(*arrival[:3])) for arrival in everything]
    assert min(lengths) < LONGEST == max(lengths)
    check(llama, llm_for(scheduler).engine, everything)


@pytest.mark.parametrize(
    "name",
    combinations_of(FAMILIES, "mistral", "olmo2", "qwen3", "gemma2", "smollm3", "qwen2_moe"),
)
def test_every_family(tmp_path, name):
    model = TinyModel.write_member(tmp_path, name)
    page_size = FAMILIES[name]["page_size"]
    changes = {"max_num_seqs": 2, "max_num_batched_tokens": 2 + 32} | FAMILIES[name]
    # The trash page, those of the longest request, and the one an admission leaves free: two
    # requests with 60 tokens are admitted, and one has to go when they have grown.
    pages = 1 + -(-CONTEXT // page_size) + 1
    page_bytes = model.config.kv_bytes_per_token(4) * page_size
    with model.load(**changes, kv_cache_memory_bytes=pages * page_bytes) as llm:
        everything = [(index, LONGEST, False, 2 * index, 0) for index in range(len(PROMPT_LENGTHS))]
        check(model, llm.engine, everything + crowd(60), apart=True)
        grows = POLICIES[llm.engine.plan.config.scheduler].pages == "grow"
        if grows and not llm.engine.kv.windowed:  # Windows are smaller than the context.
            assert preemptions(llm.engine) > 0


def test_as_many_prompts_share_a_step_as_it_has_tokens_for(llama, tmp_path):
    """A dozen at once, and each of them samples. The model is one program a step, as on
    accelerators."""
    changes = {"scheduler": "splitfuse", "program_scope": "step", "max_num_seqs": 12}
    changes |= {"max_num_batched_tokens": 12 + 32, "trace_file": tmp_path / "trace.json"}
    with llama.load(**changes) as llm:
        check(llama, llm.engine, [(index % 3, 6, True, 0, 0) for index in range(12)], apart=True)
        steps = [record for record in llm.engine.log.records if isinstance(record, Dispatched)]
        assert len(steps[0].prefill) == 12
        assert not any(step.prefill for step in steps[1:])
