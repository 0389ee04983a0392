"""One request moved from an engine to another: the same tokens, from any moment, or a refusal."""

from __future__ import annotations

import dataclasses
import gc
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_engines import Preempter, count, preemptible, prefilled, token_ids
from tiny_engines import LONGEST, PAGE_SIZE, PROMPT_LENGTHS, assert_idle

from jaxserve.core.errors import RequestError, SnapshotError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.requests.structured_outputs import StructuredOutputs
from jaxserve.engine.snapshot import kv as snapshot_kv
from jaxserve.engine.snapshot.migration import Migration
from jaxserve.engine.snapshot.requests import RequestSnapshot
from jaxserve.engine.snapshot.saved_kv import SavedKV
from jaxserve.engine.snapshot.stream import PartReader
from jaxserve.kv.layout import TRANSFER_PAGES

GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
SEEDED = dataclasses.replace(GREEDY, temperature=0.8, seed=5)
KINDS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "penalized": dataclasses.replace(SEEDED, presence_penalty=1.0, repetition_penalty=1.5),
    "scored": dataclasses.replace(GREEDY, logprobs=2, prompt_logprobs=1),
    "several": dataclasses.replace(SEEDED, n=3, max_tokens=9),
    "stopped": dataclasses.replace(SEEDED, stop=("a", "e"), ignore_eos=False),
    "structured": dataclasses.replace(
        SEEDED, ignore_eos=False, structured_outputs=StructuredOutputs(regex="[a-f]{4,20}!")
    ),
}
SWAPPING = {"preemption": "swap", "host": 64}


@pytest.fixture
def engines(kv_llm_for):
    """Where a request begins, with a lower tier, and where it goes on, with larger pages."""
    source, target = kv_llm_for(**SWAPPING), kv_llm_for(page_size=2 * PAGE_SIZE)
    yield source, target
    for llm in (source, target):
        for request_id in list(llm.engine._requests):
            llm.abort(request_id)


def begun(llm, prompt, params, steps):
    stream = llm.stream({"prompt_token_ids": prompt}, params)
    for _ in range(steps):
        llm.engine.step()
    return stream


@settings(max_examples=10, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    length=st.sampled_from(PROMPT_LENGTHS[3:]),
    steps=st.integers(0, 30),
    with_kv=st.booleans(),
    disturbed=st.booleans(),
)
def test_a_request_moved_after_any_step(
    llama, alone, kv_llm_for, kind, length, steps, with_kv, disturbed
):
    source, target = kv_llm_for(**SWAPPING), kv_llm_for(page_size=2 * PAGE_SIZE)
    prompt, params = llama.prompts[PROMPT_LENGTHS.index(length)], KINDS[kind]
    other = source.stream({"prompt_token_ids": llama.prompts[-1]}, GREEDY)  # Shares prompt pages.
    stream = source.stream({"prompt_token_ids": prompt}, params)
    preempter = Preempter(source.engine, seed=steps, evicts=True)
    for _ in range(steps):
        source.engine.step()
        if disturbed:
            preempter()
    if stream.request.finished:
        with pytest.raises(RequestError, match="not an unfinished request"):
            source.export_request(stream.request_id)
        other.close()
        return
    # The target runs while the parts arrive, and so does the source after they were made.
    elsewhere = begun(target, llama.prompts[5], SEEDED, 3)
    parts = list(source.export_request(stream.request_id, with_kv))
    source.engine.step()
    moved = target.import_request(iter(parts)).result()
    assert elsewhere.result().finished
    stayed = stream.result()
    other.close()
    assert token_ids(moved) == token_ids(stayed) == alone.tokens(prompt, params)
    for ours, theirs in zip(moved.outputs, stayed.outputs, strict=True):
        assert (ours.text, ours.finish_reason, ours.stop_reason) == (
            theirs.text,
            theirs.finish_reason,
            theirs.stop_reason,
        )
        assert (ours.logprobs is None) == (params.logprobs is None)
    assert_idle(target.engine)


def test_only_the_newest_token_is_computed_again(llama, alone, engines):
    source, target = engines
    stream = begun(source, llama.prompts[-1], SEEDED, 12)
    parts = list(source.export_request(stream.request_id))
    stream.close()
    computed, output = prefilled(target.engine, lambda: target.import_request(parts).result())
    assert token_ids(output) == alone.tokens(llama.prompts[-1], SEEDED)
    assert computed == 1


def test_kv_that_was_converted_goes_after_the_pages_that_are_cached(llama, alone, engines):
    source, target = engines
    prompt = llama.prompts[-1]
    target.generate({"prompt_token_ids": prompt[: len(prompt) // 2]}, GREEDY, use_tqdm=False)
    stream = begun(source, prompt, SEEDED, 12)
    parts = target.engine.migration.received(source.export_request(stream.request_id))
    stream.close()
    computed, output = prefilled(target.engine, lambda: target.import_request(parts).result())
    assert token_ids(output) == alone.tokens(prompt, SEEDED) and computed == 1


@pytest.mark.parametrize("kind", ["seeded", "several"])
@pytest.mark.parametrize("caching", [True, False])
def test_a_staged_request_computes_only_what_came_since(llama, alone, kv_llm_for, kind, caching):
    """It runs on while its KV is copied; then it comes with the tokens that it has by then."""
    params, prompt = KINDS[kind], llama.prompts[-2]
    source = kv_llm_for(**SWAPPING)
    target = kv_llm_for(page_size=2 * PAGE_SIZE, enable_prefix_caching=caching)
    stream = begun(source, prompt, params, 5)
    parts = source.engine.migration.export_request(stream.request_id)
    parts = target.engine.migration.received(parts)
    target.engine.migration.stage_request(parts, "moved")
    held = [len(output.seq.output_token_ids) for output in stream.request.sequence_outputs]
    for _ in range(3):
        source.engine.step()
    since = [len(output.seq.output_token_ids) for output in stream.request.sequence_outputs]
    state = RequestSnapshot.of(stream.request, None, 0)
    added = dataclasses.replace(state.added, request_id="moved")
    stream.close()

    def finished():
        request = target.engine.migration.resume_request(dataclasses.replace(state, added=added))
        while not request.finished:
            target.engine.step()
        return target.engine.output(request)

    computed, output = prefilled(target.engine, finished)
    assert token_ids(output) == alone.tokens(prompt, params)
    # Of a sequence, also the last token that was read may not have been written yet.
    num_since = sum(since) - sum(held)
    assert len(held) < num_since <= computed <= num_since + len(held)
    assert_idle(target.engine)
    assert not any(node.pins for node in target.engine.kv.tree)


@pytest.mark.parametrize("caching", [True, False])
def test_pages_are_staged_while_the_prompt_is_computed(llama, alone, kv_llm_for, caching):
    """Each stage brings what the chunks since the one before have computed, once."""
    prompt, params = llama.prompts[-1], SEEDED
    source = kv_llm_for(enable_prefix_caching=False)
    target = kv_llm_for(page_size=2 * PAGE_SIZE, enable_prefix_caching=caching)
    target.reset_prefix_cache()
    stream = begun(source, prompt, params, 0)
    (output,) = stream.request.sequence_outputs
    staged, exported, migration = [0], 0, target.engine.migration
    while staged[-1] < len(prompt):
        source.engine.step()
        before = source.engine.migration.num_computed(stream.request_id)
        assert before == output.seq.num_written
        whole = before - before % PAGE_SIZE if before < len(prompt) else before
        span = {"start": staged[-1], "stop": staged[-1] + PAGE_SIZE}
        page = source.engine.migration.export_request(stream.request_id, **span)
        assert sum(rows_of(page)) == (PAGE_SIZE if whole > staged[-1] else 0)
        parts = list(source.engine.migration.export_request(stream.request_id, start=staged[-1]))
        exported += sum(rows_of(parts))
        received = parts if caching else migration.received(parts)
        staged.append(migration.stage_request(received, "moved"))
        assert staged[-1] == whole
    assert len(staged) > 4 and sorted(set(staged)) == staged
    # A half of one of the larger pages comes again with the rest of it.
    assert len(prompt) <= exported <= len(prompt) + PAGE_SIZE * len(staged)
    state = RequestSnapshot.of(stream.request, None, 0)
    added = dataclasses.replace(state.added, request_id="moved")
    num_left = output.seq.num_tokens - staged[-1]
    stream.close()

    def finished():
        request = migration.resume_request(dataclasses.replace(state, added=added))
        while not request.finished:
            target.engine.step()
        return target.engine.output(request)

    computed, output = prefilled(target.engine, finished)
    assert token_ids(output) == alone.tokens(prompt, params)
    assert computed <= max(1, num_left)
    assert_idle(target.engine)
    assert not any(node.pins for node in target.engine.kv.tree)


@pytest.mark.parametrize("caching", [True, False])
def test_what_was_taken_is_read_while_its_pages_are_written(llama, alone, kv_llm_for, caching):
    """Of a prompt's first chunks, once its request has ended and another one has its pages."""
    prompt = llama.prompts[-1]
    source = kv_llm_for(enable_prefix_caching=False)
    target = kv_llm_for(page_size=2 * PAGE_SIZE, enable_prefix_caching=caching)
    target.reset_prefix_cache()
    migration = source.engine.migration
    stream, begun_parts, sizes = begun(source, prompt, SEEDED, 0), [], [0]
    while sizes[-1] + PAGE_SIZE <= len(prompt):
        source.engine.step()
        begun_parts.append(migration.begin_export(stream.request_id, start=sizes[-1]))
        written = migration.num_computed(stream.request_id)
        sizes.append(min(written - written % PAGE_SIZE, len(prompt)))
        if len(sizes) == 3:  # More than two steps have computed are not kept on the device.
            before = sum(taken.num_takes for taken in migration._taken)
            late = migration.begin_export(stream.request_id, start=0)
            assert sum(taken.num_takes for taken in migration._taken) == before > 0
            assert sum(rows_of(late)) == sizes[-1]
    state = RequestSnapshot.of(stream.request, None, 0)
    stream.close()
    source.generate({"prompt_token_ids": prompt[::-1]}, GREEDY, use_tqdm=False)
    for parts, size in zip(begun_parts, sizes[1:]):
        assert target.engine.migration.stage_request(parts, "moved") == size
    assert not sum(taken.num_takes for taken in migration._taken)
    added = dataclasses.replace(state.added, request_id="moved")

    def finished():
        moved = dataclasses.replace(state, added=added)
        request = target.engine.migration.resume_request(moved)
        while not request.finished:
            target.engine.step()
        return target.engine.output(request)

    computed, output = prefilled(target.engine, finished)
    assert token_ids(output) == alone.tokens(prompt, SEEDED)
    assert computed <= max(1, len(prompt) - sizes[-1] + 1)
    assert_idle(target.engine)
    assert not any(node.pins for node in target.engine.kv.tree)


def test_copies_take_the_memory_that_is_counted(llama, kv_llm_for, monkeypatch):
    """Of more pages than a copy has, in files of fewer, and none where nothing is free."""
    source = kv_llm_for(enable_prefix_caching=False)
    engine, memory = source.engine, source.engine.plan.memory
    monkeypatch.setattr(snapshot_kv, "_FILE_BYTES", 3 * memory.page_bytes)
    stream = begun(source, llama.prompts[-1], SEEDED, 8)
    of_copy = TRANSFER_PAGES * memory.page_bytes
    for num_copies, expected in ((2, 2), (1, 0), (0, 0)):
        limit = memory.total_bytes + num_copies * of_copy
        memory_left = dataclasses.replace(memory, limit_bytes=limit)
        migration = Migration(engine.migration._engine, memory_left)
        read = [*kv_of(engine.migration.export_request(stream.request_id))]
        gc.collect()
        before = device_bytes()
        parts = migration.begin_export(stream.request_id)
        assert device_bytes() - before == expected * of_copy
        assert sum(copies.num_takes for copies in migration._taken) == expected
        engine.step()
        for kv, rows in zip(kv_of(parts), read, strict=True):
            np.testing.assert_array_equal(kv, rows)
    assert len(read) > TRANSFER_PAGES / 3
    stream.close()


def device_bytes():
    """Bytes of all arrays; on CPUs several may be views of the same."""
    shards = (shard.data for array in jax.live_arrays() for shard in array.addressable_shards)
    return sum({data.unsafe_buffer_pointer(): data.nbytes for data in shards}.values())


def rows_of(parts):
    """The tokens whose KV is in each array of an exported request."""
    return map(len, kv_of(parts))


def kv_of(parts):
    """The arrays of KV of an exported request."""
    reader = PartReader(parts)
    reader.json("requests")
    if reader.has("kv"):
        for name, _ in reader.json("kv")["files"]:
            yield reader.rows(name, 0, 1 << 20)


def test_what_was_staged_and_does_not_come_is_unpinned(llama, engines):
    source, target = engines
    stream = begun(source, llama.prompts[-1], SEEDED, 5)
    for _ in range(2):  # The second takes the place of the first.
        parts = list(source.engine.migration.export_request(stream.request_id))
        target.engine.migration.stage_request(parts, "given up")
    stream.close()
    assert any(node.pins for node in target.engine.kv.tree)
    target.engine.migration.unstage_request("given up")
    target.engine.migration.unstage_request("given up")
    with pytest.raises(RequestError, match="was given up here"):
        target.engine.migration.stage_request(parts, "given up")
    assert not any(node.pins for node in target.engine.kv.tree)
    assert_idle(target.engine)


def test_pages_on_a_lower_tier_come_along(llama, alone, engines):
    source, target = engines
    stream = begun(source, llama.prompts[-1], SEEDED, 14)
    (seq,) = preemptible(source.engine)
    source.engine.scheduler.preempt(seq)
    source.engine.kv.evict(source.engine.kv.pool.capacity)
    source.engine._kv_executor.settle()
    assert count(source.engine, "kv_pages", "cached") == 0
    parts = list(source.export_request(stream.request_id))
    computed, output = prefilled(target.engine, lambda: target.import_request(parts).result())
    assert token_ids(output) == alone.tokens(llama.prompts[-1], SEEDED)
    assert computed == 1


def test_kv_comes_in_parts_and_is_freed_as_it_is_written(llama, alone, engines, monkeypatch):
    source, target = engines
    page_bytes = llama.config.kv_bytes_per_token(4) * PAGE_SIZE
    monkeypatch.setattr(snapshot_kv, "_FILE_BYTES", 4 * page_bytes)
    several = dataclasses.replace(KINDS["several"], max_tokens=12)
    stream = begun(source, llama.prompts[-2], several, 10)
    parts = list(source.export_request(stream.request_id))
    arrays = [part for part in parts if part.startswith(b"kv-")]
    assert len(arrays) > 5
    assert max(map(len, arrays)) < 4 * page_bytes + 500
    most = 0
    readers = []

    class Reader(SavedKV):
        def __init__(self, reader, **options):
            super().__init__(reader, **options)
            readers.append(reader)

        def _row_range(self, row, number):
            nonlocal most
            rows = super()._row_range(row, number)
            most = max(most, len(readers[0]._arrays))
            return rows

    monkeypatch.setattr("jaxserve.engine.snapshot.access.SavedKV", Reader)
    computed, output = prefilled(target.engine, lambda: target.import_request(parts).result())
    assert token_ids(output) == alone.tokens(llama.prompts[-2], several)
    # The prompt's arrays are kept for the three samples, others go as they are written.
    assert most < len(arrays)
    assert computed <= 3 * 2 * PAGE_SIZE


def test_a_move_back_and_forth_streams_from_the_first_token(llama, alone, engines):
    source, target = engines
    stream = begun(source, llama.prompts[5], SEEDED, 6)
    seen = [delta for delta, _ in zip(stream, range(4))]
    there = target.import_request(list(source.export_request(stream.request_id)))
    stream.close()
    for _ in range(5):
        target.engine.step()
    back = source.import_request(list(target.export_request(there.request_id)))
    there.close()
    deltas = list(back)
    assert [delta.token_ids for delta in deltas[:4]] == [delta.token_ids for delta in seen]
    (expected,) = alone.tokens(llama.prompts[5], SEEDED)
    assert tuple(itertools.chain(*(delta.token_ids for delta in deltas))) == expected


def test_parts_read_after_a_step_are_refused(llama, engines):
    source, _ = engines
    stream = begun(source, llama.prompts[-1], SEEDED, 5)
    parts = source.export_request(stream.request_id)
    next(parts)
    source.engine.step()
    with pytest.raises(SnapshotError, match="has gone on since the export began"):
        next(parts)
    parts = source.export_request(stream.request_id)
    stream.close()
    with pytest.raises(SnapshotError, match="before a request is aborted"):
        next(parts)


# Refusals: nothing has changed


def damaged(parts, place, byte):
    part = bytearray(parts[place])
    part[byte % len(part)] ^= 1
    return [*parts[:place], bytes(part), *parts[place + 1 :]]


@settings(max_examples=10, deadline=None)
@given(place=st.integers(0, 5), byte=st.integers(0, 10_000), lost=st.booleans())
def test_any_part_damaged_or_lost(llama, alone, kv_llm_for, place, byte, lost):
    source, target = kv_llm_for(**SWAPPING), kv_llm_for(page_size=2 * PAGE_SIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_kv, "_FILE_BYTES", 1 << 14)
        stream = begun(source, llama.prompts[-1], SEEDED, 12)
        parts = list(source.export_request(stream.request_id))
    place %= len(parts)
    bad = [*parts[:place], *parts[place + 1 :]] if lost else damaged(parts, place, byte)
    with pytest.raises(SnapshotError):
        target.import_request(bad)
    assert_idle(target.engine)
    assert not target.engine._requests
    # It can be sent again, and has gone on where it was.
    again = target.import_request(parts).result()
    expected = alone.tokens(llama.prompts[-1], SEEDED)
    assert token_ids(again) == token_ids(stream.result()) == expected


def changed(parts, **facts):
    """The parts with other facts in the header."""
    from jaxserve.engine.snapshot.stream import PartReader, _part

    header = {"version": 1, "facts": PartReader(parts).facts}
    header["facts"] |= {name: value for name, value in facts.items() if name != "version"}
    header["version"] = facts.get("version", 1)
    return [_part("header", header), *parts[1:]]


@pytest.mark.parametrize(
    "facts",
    [
        {"fingerprint": "f00"},
        {"vocabulary": "f00"},
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"version": 99},
    ],
    ids=lambda facts: next(iter(facts)),
)
def test_another_engine_is_refused_by_name(llama, engines, facts):
    source, target = engines
    stream = begun(source, llama.prompts[-1], SEEDED, 6)
    parts = list(source.export_request(stream.request_id))
    ((name, value),) = facts.items()
    with pytest.raises(SnapshotError, match=rf"{name} (is )?'?{value}"):
        target.import_request(changed(parts, **facts))
    assert_idle(target.engine)
    with pytest.raises(SnapshotError, match="has the id"):
        source.engine.migration.import_request(parts)
    source.engine.abort(source.engine.migration.import_request(parts, "another").request_id)
    with pytest.raises(SnapshotError, match="without an end"):
        target.import_request([])


def test_a_request_too_long_for_the_other_engine(llama, engines, kv_llm_for):
    source, _ = engines
    short = kv_llm_for(max_model_len=64)
    stream = begun(source, llama.prompts[-1], SEEDED, 6)
    with pytest.raises(SnapshotError, match="does not fit this engine"):
        short.import_request(list(source.export_request(stream.request_id)))
    assert_idle(short.engine)


def test_kv_of_another_shape_is_refused(llama, engines):
    _, target = engines
    pages = target.engine._token_kv
    with pytest.raises(SnapshotError, match="float16"):
        shape = 1, 2 * PAGE_SIZE, *pages.layouts[0].token_shape
        pages.to_pages([np.zeros(shape, np.float16)])
