"""A plan packed into one vector and read back: every token at its place, padding in the trash."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.plan import Chunk, StepPlan
from jaxserve.engine.sequence import Sequence
from jaxserve.kv.pages import TRASH_PAGE
from jaxserve.runtime.batch import Snapshot, StepLayout
from jaxserve.runtime.buckets import ProgramKey
from jaxserve.sampling_params import SamplingParams

PAGE_SIZE, MAX_PAGES, TRASH_SLOT = 4, 8, 9


def layout(rows, prefill_tokens):
    return StepLayout(ProgramKey(rows, prefill_tokens), TRASH_SLOT, MAX_PAGES, PAGE_SIZE)


def sequence(slot, prompt_length, first_page):
    seq = Sequence(
        seq_id=slot,
        request_id=str(slot),
        index=0,
        prompt_token_ids=[1000 * (slot + 1) + place for place in range(prompt_length)],
        params=SamplingParams(),
        arrival_us=slot,
    )
    seq.slot = slot
    count = -(-prompt_length // PAGE_SIZE)
    seq.table.pages = list(range(first_page, first_page + count))[::-1]
    return seq


@st.composite
def plans(draw):
    """Up to 5 decodes and 3 chunks of at most 7 tokens, each of a sequence of its own."""
    first_page, chunks = 1, []
    num_decodes, num_prefills = draw(st.integers(0, 5)), draw(st.integers(0, 3))
    for slot in range(num_decodes + num_prefills):
        most = 1 if slot < num_decodes else 7
        length = draw(st.integers(1, MAX_PAGES * PAGE_SIZE))
        count = draw(st.integers(1, min(most, length)))
        seq = sequence(slot, length, first_page)
        first_page += len(seq.pages)
        samples = slot < num_decodes or draw(st.booleans())
        chunks.append(Chunk(seq, length - count, count, samples, 0, slot))
    return StepPlan(tuple(chunks[:num_decodes]), tuple(chunks[num_decodes:]))


@settings(max_examples=60, deadline=None)
@given(plan=plans())
def test_every_token_is_read_back_where_it_belongs(plan):
    where = layout(rows=5, prefill_tokens=24)
    vector = where.pack(Snapshot.of(plan))
    assert (vector.shape, vector.dtype) == ((where.size,), np.int32)
    step = where.unpack(jnp.asarray(vector))
    page_ids, offsets = (np.asarray(a) for a in step.addresses[:2])
    positions, batch = np.asarray(step.positions), step.addresses.batch
    owned, last_tokens, rows = set(), [], []
    for row, chunk in enumerate(plan.decodes):
        rows.append((row, chunk, row))
    start = 5
    for row, chunk in enumerate(plan.prefills, 5):
        rows.append((row, chunk, start))
        start += chunk.num_tokens
    for row, chunk, start in rows:
        end = chunk.start + chunk.num_tokens
        assert int(batch.context[row]) == end
        assert (int(batch.starts[row]), int(batch.lengths[row])) == (start, chunk.num_tokens)
        assert batch.tables[row, : len(chunk.seq.pages)].tolist() == chunk.seq.pages
        for place, position in enumerate(range(chunk.start, end), start):
            owned.add(place)
            assert positions[place] == position
            assert page_ids[place] == chunk.seq.pages[position // PAGE_SIZE]
            assert offsets[place] == position % PAGE_SIZE
            if row >= 5:
                assert step.prefill_ids[place - 5] == chunk.seq.prompt_token_ids[position]
            else:
                assert step.slots[place] == chunk.slot
        if chunk.samples:
            last_tokens.append(start + chunk.num_tokens - 1)
    assert step.sampled[: len(last_tokens)].tolist() == last_tokens
    nobody = sorted(set(range(where.key.num_tokens)) - owned)
    assert (page_ids[nobody] == TRASH_PAGE).all()
    assert (np.asarray(step.slots)[len(plan.decodes) :] == TRASH_SLOT).all()
    written = [(page_ids[token], offsets[token]) for token in owned]
    assert len(set(written)) == len(owned)


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, MAX_PAGES * PAGE_SIZE), min_size=1, max_size=5))
def test_a_step_of_decodes_alone(lengths):
    where = layout(rows=5, prefill_tokens=0)
    first_page, chunks = 1, []
    for slot, length in enumerate(lengths):
        seq = sequence(slot, length, first_page)
        first_page += len(seq.pages)
        chunks.append(Chunk(seq, length - 1, 1, True, 0, slot))
    step = where.unpack(jnp.asarray(where.pack(Snapshot.of(StepPlan(decodes=tuple(chunks))))))
    count = len(lengths)
    assert step.positions[:count].tolist() == [length - 1 for length in lengths]
    expected = [chunk.seq.pages[chunk.start // PAGE_SIZE] for chunk in chunks]
    assert step.addresses.page_ids.tolist() == expected + [TRASH_PAGE] * (5 - count)
    assert step.sampled[:count].tolist() == list(range(count))
    assert step.addresses.batch.context.tolist() == lengths + [0] * (5 - count)
    assert step.prefill_ids.shape == (0,)


def test_fields_cover_the_vector_without_overlap():
    for where in (layout(5, 24), layout(0, 24), layout(5, 0)):
        places = np.concatenate(
            [np.arange(where.size)[place] for place, _ in where.fields.values()]
        )
        assert places.tolist() == list(range(where.size))
