"""A plan packed into one vector and read back: every token at its place, padding in the trash."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence
from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.core.steps.plan import DecodeGroup, ScheduledChunk, StepPlan
from jaxserve.kv.layout import KVGroup, KVLayout
from jaxserve.kv.page_table import PageTable
from jaxserve.kv.pages import TRASH_PAGE
from jaxserve.runtime.programs.layout.frozen_plan import FrozenPlan
from jaxserve.runtime.programs.layout.step_layout import StepLayout
from jaxserve.runtime.programs.page_programs import set_tables

PAGE_SIZE, MAX_PAGES, TRASH_SLOT = 4, 8, 9


def layout(rows, prefill_tokens):
    return StepLayout(ProgramKey(rows, prefill_tokens), TRASH_SLOT, MAX_PAGES, KVLayout(PAGE_SIZE))


class Held(NamedTuple):
    """A sequence, and the pages it holds."""

    seq: Sequence
    table: PageTable

    @property
    def pages(self):
        return self.table.pages

    def chunk(self, start, num_tokens, samples=True):
        table, slot = self.table, self.seq.slot
        return ScheduledChunk(
            self.seq, start, num_tokens, samples, 0, slot, table.pages, table.upload()
        )


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
    table = PageTable(seq.token_ids, seq.salt)
    table.pages = list(range(first_page, first_page + count))[::-1]
    return Held(seq, table)


def empty_tables():
    return jnp.zeros((TRASH_SLOT + 1, MAX_PAGES), jnp.int32)


def upload(where, plan, tables):
    """The metadata of a plan, and the tables with the rows that it replaces whole."""
    frozen = FrozenPlan.of(plan, KVLayout(PAGE_SIZE), TRASH_SLOT)
    for slot, pages in frozen.tables:
        row = np.zeros((1, MAX_PAGES), np.int32)
        row[0, : len(pages)] = pages
        tables = set_tables(1, tables, jnp.array([slot]), jnp.asarray(row))
    return where.pack(frozen), tables


def check_table(row, chunk, context):
    """The pages of the chunk's context, and the trash page behind them."""
    used = -(-context // PAGE_SIZE)
    assert row.tolist() == list(chunk.pages)[:used] + [TRASH_PAGE] * (MAX_PAGES - used)


@st.composite
def plans(draw):
    """Up to 5 decodes and 3 chunks of at most 7 tokens, each of a sequence of its own."""
    first_page, chunks = 1, []
    num_decodes, num_prefills = draw(st.integers(0, 5)), draw(st.integers(0, 3))
    for slot in range(num_decodes + num_prefills):
        most = 1 if slot < num_decodes else 7
        length = draw(st.integers(1, MAX_PAGES * PAGE_SIZE))
        count = draw(st.integers(1, min(most, length)))
        held = sequence(slot, length, first_page)
        first_page += len(held.pages)
        samples = slot < num_decodes or draw(st.booleans())
        chunks.append(held.chunk(length - count, count, samples))
    return StepPlan(tuple(chunks[:num_decodes]), tuple(chunks[num_decodes:]))


@settings(max_examples=60, deadline=None)
@given(plan=plans())
def test_every_token_is_read_back_where_it_belongs(plan):
    where = layout(rows=5, prefill_tokens=24)
    vector, tables = upload(where, plan, empty_tables())
    assert (vector.shape, vector.dtype) == ((where.size,), np.int32)
    _, step = where.unpack(tables, jnp.asarray(vector))
    page_ids, offsets = (np.asarray(a) for a in step.slot_mappings[0][:2])
    positions, batch = np.asarray(step.positions), step.slot_mappings[0].batch
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
        check_table(batch.tables[row], chunk, end)
        for place, position in enumerate(range(chunk.start, end), start):
            owned.add(place)
            assert positions[place] == position
            assert page_ids[place] == list(chunk.pages)[position // PAGE_SIZE]
            assert offsets[place] == position % PAGE_SIZE
            if row >= 5:
                assert step.prefill_ids[place - 5] == chunk.seq.prompt_token_ids[position]
            else:
                assert step.slots[place] == chunk.slot
        if chunk.samples:
            last_tokens.append(start + chunk.num_tokens - 1)
    assert step.sampled[: len(last_tokens)].tolist() == last_tokens
    padding = sorted(set(range(where.key.num_tokens)) - owned)
    assert (page_ids[padding] == TRASH_PAGE).all()
    assert (np.asarray(step.slots)[len(plan.decodes) :] == TRASH_SLOT).all()
    written = [(page_ids[token], offsets[token]) for token in owned]
    assert len(set(written)) == len(owned)


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, MAX_PAGES * PAGE_SIZE), min_size=1, max_size=5))
def test_a_step_of_decodes_alone(lengths):
    where = layout(rows=5, prefill_tokens=0)
    first_page, chunks = 1, []
    for slot, length in enumerate(lengths):
        held = sequence(slot, length, first_page)
        first_page += len(held.pages)
        chunks.append(held.chunk(length - 1, 1))
    vector, tables = upload(where, StepPlan(decodes=tuple(chunks)), empty_tables())
    _, step = where.unpack(tables, jnp.asarray(vector))
    count = len(lengths)
    assert step.positions[:count].tolist() == [length - 1 for length in lengths]
    expected = [list(chunk.pages)[chunk.start // PAGE_SIZE] for chunk in chunks]
    assert step.slot_mappings[0].page_ids.tolist() == expected + [TRASH_PAGE] * (5 - count)
    assert step.sampled[:count].tolist() == list(range(count))
    assert step.slot_mappings[0].batch.context.tolist() == lengths + [0] * (5 - count)
    assert step.prefill_ids.shape == (0,)


def test_fields_cover_the_vector_without_overlap():
    for where in (layout(5, 24), layout(0, 24), layout(5, 0)):
        places = np.concatenate(
            [np.arange(where.size)[place] for place, _ in where.fields.values()]
        )
        assert places.tolist() == list(range(where.size))


class TablesOfSteps(RuleBasedStateMachine):
    """Sequences that take pages and slots, grow, have pages replaced and leave, with steps of some
    of them in between: the device's tables are those of the host whenever a step reads them, also
    in the later stages of a pipeline, which a step reaches when the host's have changed again."""

    STAGES = 3
    layout = layout(rows=5, prefill_tokens=24)
    unpack = staticmethod(jax.jit(layout.unpack))

    def __init__(self):
        super().__init__()
        self.tables = [empty_tables()] * self.STAGES
        self.slots = list(range(TRASH_SLOT))
        self.running: list[Held] = []
        self.in_flight = collections.deque([None] * (self.STAGES - 1))
        self.pages = itertools.count(1)

    def new_pages(self, count):
        return list(itertools.islice(self.pages, count))

    @precondition(lambda self: self.slots)
    @rule(num_pages=st.integers(1, MAX_PAGES))
    def admit(self, num_pages):
        held = sequence(self.slots.pop(), num_pages * PAGE_SIZE, next(self.pages))
        held.table.pages = self.new_pages(num_pages)
        self.running.append(held)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def extend(self, data):
        held = data.draw(st.sampled_from(self.running))
        if len(held.pages) < MAX_PAGES:
            held.table.pages += self.new_pages(1)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def replace(self, data):
        held = data.draw(st.sampled_from(self.running))
        index = data.draw(st.integers(0, len(held.pages) - 1))
        held.table.replace(index, *self.new_pages(1))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data):
        held = data.draw(st.sampled_from(self.running))
        self.running.remove(held)
        self.slots.append(held.seq.slot)
        held.table.clear()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def step(self, data):
        some = data.draw(st.lists(st.sampled_from(self.running), max_size=8, unique=True))
        decodes, prefills = some[:5], some[5:]
        chunks = [(held, data.draw(st.integers(1, 4))) for held in prefills]
        plan = StepPlan(
            tuple(held.chunk(len(held.pages) * PAGE_SIZE - 1, 1) for held in decodes),
            tuple(held.chunk(0, count, samples=False) for held, count in chunks),
        )
        expected = [list(held.pages) for held in decodes]
        expected += [held.pages[: -(-count // PAGE_SIZE)] for held, count in chunks]
        self.pipeline_step(
            (FrozenPlan.of(plan, KVLayout(PAGE_SIZE), TRASH_SLOT), expected, len(decodes))
        )

    @rule()
    def bubble(self):
        self.pipeline_step(None)

    def pipeline_step(self, entering):
        self.in_flight.append(entering)
        for stage, step in enumerate(reversed(self.in_flight)):
            if step is not None:
                self.run(stage, *step)
        self.in_flight.popleft()

    def run(self, stage, frozen, expected, num_decodes):
        for slot, pages in frozen.tables:
            row = np.zeros((1, MAX_PAGES), np.int32)
            row[0, : len(pages)] = pages
            self.tables[stage] = set_tables(1, self.tables[stage], jnp.array([slot]), row)
        vector = jnp.asarray(self.layout.pack(frozen))
        self.tables[stage], step = self.unpack(self.tables[stage], vector)
        rows = np.asarray(step.slot_mappings[0].batch.tables)
        read = [*rows[:num_decodes], *rows[self.layout.key.rows :]]
        for row, pages in itertools.zip_longest(read, expected, fillvalue=[]):
            assert list(row) == pages + [TRASH_PAGE] * (MAX_PAGES - len(pages))


TablesOfSteps.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_tables_of_steps = TablesOfSteps.TestCase


def test_a_step_uploads_changes_of_tables_only():
    held = sequence(3, 6, 11)

    def changes():
        step = FrozenPlan.of(StepPlan((held.chunk(5, 1),)), KVLayout(PAGE_SIZE), TRASH_SLOT)
        return step.updates, step.tables

    assert changes() == ([], [(3, [12, 11])])  # More pages than a decode adds.
    assert changes() == ([], [])
    held.table.pages.append(20)
    assert changes() == ([(3, 2, 20)], [])
    held.table.replace(2, 30)
    assert changes() == ([(3, 2, 30)], [])
    held.table.replace(0, 31)
    assert changes() == ([], [(3, [31, 11, 30])])


def test_groups_of_decodes_are_in_tokens_and_padded():
    """Two tokens for each of four decodes, two of which share two pages."""
    key = ProgramKey(4, 0, width=2)
    kv = KVLayout(PAGE_SIZE, (KVGroup(None, (0,)), KVGroup(6, (1,))))
    where = StepLayout(key, TRASH_SLOT, MAX_PAGES, kv, max_width=2, shares_prefixes=True)
    chunks = tuple(sequence(slot, 12, 1 + 4 * slot).chunk(11, 1) for slot in range(3))
    plan = StepPlan(chunks, decode_groups=(DecodeGroup(1, 2, 2),))
    vector = where.pack(FrozenPlan.of(plan, kv, TRASH_SLOT))
    place, shape = where.fields["decode_groups"]
    groups = [[2, 4, 2 * PAGE_SIZE], [8, 0, 0]]
    assert vector[place].reshape(shape).tolist() == groups
    one = dataclasses.replace(where, key=ProgramKey(4, 0))
    tables = jnp.zeros((2 * (TRASH_SLOT + 1), MAX_PAGES), jnp.int32)
    vector = jnp.asarray(one.pack(FrozenPlan.of(plan, kv, TRASH_SLOT)))
    full, windowed = one.unpack(tables, vector)[1].slot_mappings
    assert [field.tolist() for field in full.decode_groups] == [[1, 4], [2, 0], [2 * PAGE_SIZE, 0]]
    assert windowed.decode_groups is None
    assert "decode_groups" not in dataclasses.replace(where, shares_prefixes=False).fields


def test_a_group_with_a_window_has_rows_of_its_own_and_reads_no_page_it_gave_back():
    kv = KVLayout(PAGE_SIZE, (KVGroup(None, (0,)), KVGroup(6, (1,))))
    where = StepLayout(ProgramKey(2, 0), TRASH_SLOT, MAX_PAGES, kv)
    held, given_back = sequence(3, 21, 11), 99
    others = (([given_back] * 3 + [30, 31, 32], 0),)
    plan = StepPlan((held.chunk(20, 1)._replace(others=others),))
    frozen = FrozenPlan.of(plan, kv, TRASH_SLOT)
    assert [row for row, _ in frozen.tables] == [3, TRASH_SLOT + 1 + 3]
    tables = jnp.zeros((2 * (TRASH_SLOT + 1), MAX_PAGES), jnp.int32)
    for slot, pages in frozen.tables:
        row = np.zeros((1, MAX_PAGES), np.int32)
        row[0, : len(pages)] = pages
        tables = set_tables(1, tables, jnp.array([slot]), jnp.asarray(row))
    _, step = where.unpack(tables, jnp.asarray(where.pack(frozen)))
    full, windowed = step.slot_mappings
    check_table(full.batch.tables[0], plan.decodes[0], 21)
    # The token at 20 sees those from 15 on.
    assert windowed.batch.tables[0].tolist() == [TRASH_PAGE] * 3 + [30, 31, 32] + [TRASH_PAGE] * 2
    assert (int(full.page_ids[0]), int(windowed.page_ids[0])) == (held.pages[5], 32)
    assert full.offsets.tolist() == windowed.offsets.tolist()
