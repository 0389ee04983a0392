from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling_reference as reference
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.sampling import (
    NO_TOKEN,
    admit,
    general,
    greedy,
    pack_admission,
    pack_rows,
    row_constants,
    vocabulary,
)
from jaxserve.sampling.rows import NUM_FIELDS
from jaxserve.structured.bitmask import mask_words

VOCAB = 1500
SLOTS = 5
TRASH = SLOTS
STOPS = (3, 11)

run_greedy = jax.jit(greedy)
run_general = jax.jit(general)
run_admit = jax.jit(admit)


def random_logits(rows, vocab=VOCAB, seed=0, scale=3.0):
    return np.random.default_rng(seed).normal(size=(rows, vocab)).astype(np.float32) * scale


def is_tracked(bad_words):
    return any(len(word) > 1 for word in bad_words)


def sample(
    logits, params, seeds=None, slots=None, positions=None, state=None, bad_words=(), masks=None
):
    """Runs `general` on one params a row, padded to the bucket that `logits` makes."""
    state = reference.empty_state(SLOTS, logits.shape[1]) if state is None else state
    seeds = range(len(params)) if seeds is None else seeds
    multi = is_tracked(bad_words)
    rows = [row_constants(p, s, multi_token_bad_words=multi) for p, s in zip(params, seeds)]
    meta = pack_rows(
        rows,
        [TRASH] * len(rows) if slots is None else slots,
        [0] * len(rows) if positions is None else positions,
        len(logits),
        TRASH,
    )
    if masks is None:
        masks = np.zeros((len(logits), mask_words(logits.shape[1])), np.int32)
    output, state = run_general(logits, state, meta, masks)
    return jax.tree.map(np.asarray, output), state


@functools.cache
def empty_state(vocab=VOCAB):
    return reference.empty_state(SLOTS, vocab)


@pytest.mark.parametrize(("vocab", "rows"), [(1, 1), (63, 2), (64, 3), (1500, 8)])
def test_greedy_is_the_lowest_of_the_most_likely(vocab, rows):
    # Few distinct values, so that ties decide.
    logits = np.round(random_logits(rows, vocab), 0)
    np.testing.assert_array_equal(run_greedy(logits), logits.argmax(axis=1))


@pytest.mark.parametrize("levels", [3, 10**6])
def test_the_largest_few_are_those_of_a_sort(levels):
    """Also where most values are alike: the lowest tokens come first."""
    rng = np.random.default_rng(levels)
    for width in (100, 1280, 1500, 20_000):
        x = rng.integers(0, levels, (3, width)).astype(np.float32)
        x[0] = -np.inf
        values, places = vocabulary.largest_few(jnp.asarray(x), 20)
        expected = np.argsort(-x, axis=1, kind="stable")[:, :20]
        np.testing.assert_array_equal(places, expected)
        np.testing.assert_array_equal(values, np.take_along_axis(x, expected, axis=1))


def test_rows_without_a_token_are_told_apart():
    logits = random_logits(4)
    logits[0] = np.nan
    logits[1] = -np.inf
    logits[2, 7:] = -np.inf
    expected = [NO_TOKEN, NO_TOKEN, logits[2].argmax(), logits[3].argmax()]
    np.testing.assert_array_equal(run_greedy(logits), expected)
    output, _ = sample(logits, [reference.GREEDY] * 4)
    np.testing.assert_array_equal(output.token_ids, expected)
    output, state = sample(logits, [SamplingParams(presence_penalty=1.0)] * 4, slots=[0, 1, 2, 3])
    assert output.token_ids[:2].tolist() == [NO_TOKEN] * 2
    assert 0 <= output.token_ids[2] < 7 and 0 <= output.token_ids[3] < VOCAB
    assert not np.asarray(state.seen)[:2].any()


def test_one_nan_never_gives_an_id_out_of_range():
    logits = random_logits(4)
    logits[:2, [5, 700]] = np.nan
    for tokens in (run_greedy(logits), sample(logits, [SamplingParams()] * 4)[0].token_ids):
        assert ((np.asarray(tokens) >= NO_TOKEN) & (np.asarray(tokens) < VOCAB)).all()


@given(seed=st.integers(0, 1000), scale=st.sampled_from([1e-6, 0.01, 1.0, 30.0]))
@settings(max_examples=8, deadline=None)
def test_greedy_rows_of_a_general_batch_agree_with_greedy(seed, scale):
    logits = random_logits(4, seed=seed, scale=scale)
    if seed % 2:
        logits = np.round(logits / scale, 1)
    mixed = [reference.GREEDY, SamplingParams(top_k=5, top_p=0.5), reference.GREEDY]
    output, _ = sample(logits, mixed)
    expected = np.asarray(run_greedy(logits))
    np.testing.assert_array_equal(output.token_ids[[0, 2]], expected[[0, 2]])


VARIANTS = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.0, top_k=5),
    SamplingParams(top_p=0.6),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=1.5, top_k=8, top_p=0.8, min_p=0.02),
    SamplingParams(logit_bias={2: 3.0, 5: -100.0}),
    SamplingParams(allowed_token_ids=[1, 4, 9]),
    SamplingParams(repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=-0.4),
    SamplingParams(min_tokens=9, top_p=0.95),
    SamplingParams(min_tokens=4),
    SamplingParams(
        repetition_penalty=0.8, logit_bias={0: 1.0}, top_k=6, min_tokens=12, bad_words=["w"]
    ),
]


@pytest.mark.parametrize("params", VARIANTS, ids=range(len(VARIANTS)))
def test_tokens_follow_the_reference_distribution(params):
    vocab, draws = 16, 4096
    logits = random_logits(1, vocab, seed=7, scale=1.5)
    past = {"prompt": [1, 1, 6], "output": [2, 5, 2, 8]}
    bad_words = [(9,), (2, 8, 4)] if params.bad_words else []
    admission = pack_admission(
        params,
        vocab,
        past["prompt"],
        past["output"],
        eos_token_ids=STOPS,
        bad_word_ids=bad_words,
    )
    state = run_admit(reference.empty_state(SLOTS, vocab), 2, admission)
    # Every row is the same sequence at the same state, under seeds of its own.
    output, _ = sample(
        np.repeat(logits, draws, axis=0),
        [params] * draws,
        slots=[2] * draws,
        positions=[len(past["output"])] * draws,
        state=state,
        bad_words=bad_words,
    )
    expected = reference.distribution(logits[0], params, stops=STOPS, bad_words=bad_words, **past)
    counts = np.bincount(output.token_ids, minlength=vocab)
    assert counts[expected == 0].sum() == 0
    likely = expected * draws >= 5
    statistic = ((counts - expected * draws)[likely] ** 2 / (expected * draws)[likely]).sum()
    freedom = max(likely.sum() - 1, 1)
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


def test_a_token_does_not_depend_on_its_company():
    everything = [
        SamplingParams(temperature=0.9),
        SamplingParams(temperature=1.3, top_k=40, top_p=0.9),
        SamplingParams(top_p=0.99, min_p=0.001),
        reference.GREEDY,
    ]
    vocab = 9000
    logits = random_logits(4, vocab)
    for position in range(8):
        together, _ = sample(logits, everything, positions=[position] * 4)
        for order in ([2, 0, 3, 1], [3, 1]):
            bucket = np.pad(logits[order], ((0, 6 - len(order)), (0, 0)), mode="edge")
            other, _ = sample(
                bucket, [everything[i] for i in order], order, positions=[position] * len(order)
            )
            np.testing.assert_array_equal(other.token_ids[: len(order)], together.token_ids[order])
        for index in range(4):
            alone, _ = sample(
                logits[index : index + 1], [everything[index]], [index], positions=[position]
            )
            assert alone.token_ids[0] == together.token_ids[index]


def test_seed_and_position_decide_the_draw():
    logits = np.repeat(random_logits(1, scale=0.1), 6, axis=0)
    seeds, positions = [1, 1, 1, 2, 1 + 2**40, 1], [0, 1, 0, 0, 0, 2]
    tokens = sample(logits, [SamplingParams()] * 6, seeds, positions=positions)[0].token_ids
    assert tokens[0] == tokens[2]
    assert len(set(tokens.tolist())) == 5


def test_padding_is_harmless_whatever_it_holds():
    params = SamplingParams(presence_penalty=1.0, logprobs=3, min_p=0.1)
    logits = random_logits(4)
    few, _ = sample(logits[:2], [params] * 2, slots=[0, 1])
    logits[2:] = np.nan
    padded, state = sample(logits, [params] * 2, slots=[0, 1])
    np.testing.assert_array_equal(padded.token_ids[:2], few.token_ids)
    np.testing.assert_array_equal(padded.logprobs.top_ids[:2], few.logprobs.top_ids)
    assert np.asarray(state.seen)[:2].sum() == 4
    assert not np.asarray(state.seen)[2:TRASH].any()


def test_penalties_see_tokens_sampled_on_the_device():
    params = SamplingParams(temperature=0.0, frequency_penalty=1.5, repetition_penalty=1.3)
    logits = random_logits(2, seed=3)
    prompt, outputs = [4, 9, int(logits[0].argmax())], [[], []]
    state = empty_state()
    for slot in (0, 1):
        state = run_admit(state, slot, pack_admission(params, VOCAB, prompt))
    for step in range(12):
        output, state = sample(
            logits, [params] * 2, slots=[0, 1], positions=[step] * 2, state=state
        )
        for row in (0, 1):
            scores = reference.processed(logits[row], params, prompt, outputs[row])
            assert output.token_ids[row] == scores.argmax()
            outputs[row].append(int(output.token_ids[row]))
    assert len(set(outputs[0])) > 2


def test_a_resumed_sequence_has_the_state_it_lost():
    params = SamplingParams(temperature=0.0, frequency_penalty=0.7, bad_words=["two tokens"])
    logits, prompt, output = random_logits(1), [4, 9, 9], []
    state = run_admit(empty_state(), 0, pack_admission(params, VOCAB, prompt))
    for step in range(10):
        sampled, state = sample(
            logits, [params], slots=[0], positions=[step], state=state, bad_words=[(1, 2)]
        )
        output.append(int(sampled.token_ids[0]))
    resumed = run_admit(empty_state(), 3, pack_admission(params, VOCAB, prompt, output))
    np.testing.assert_array_equal(state.seen[0], resumed.seen[3])
    np.testing.assert_array_equal(state.recent[0], resumed.recent[3])


def test_bad_words_of_several_tokens_are_never_completed():
    params = SamplingParams(temperature=0.0, bad_words=["w"])
    best = [int(token) for token in np.argsort(random_logits(1)[0])[::-1]]
    logits = random_logits(1)
    first, second = best[:2]
    words = [(first, first, first), (second, first), tuple(best[:8])]
    state = run_admit(
        empty_state(), 1, pack_admission(params, VOCAB, [first, first], bad_word_ids=words)
    )
    output = []
    for step in range(14):
        sampled, state = sample(
            logits, [params], slots=[1], positions=[step], state=state, bad_words=words
        )
        scores = reference.processed(logits[0], params, (), output, bad_words=words)
        assert sampled.token_ids[0] == scores.argmax()
        output.append(int(sampled.token_ids[0]))
    # Two of the best, then never a third, nor the best after the second best.
    assert output[:5] == [first, first, second, second, second]


def test_stop_tokens_are_banned_until_min_tokens():
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=[11])
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [3, 11, 40]] = 3.0, 2.0, 1.0
    admission = pack_admission(params, VOCAB, [1], eos_token_ids=[3])
    state = run_admit(empty_state(), 4, admission)
    for position, expected in enumerate([40, 40, 40, 3, 3]):
        output, state = sample(logits, [params], slots=[4], positions=[position], state=state)
        assert output.token_ids[0] == expected


def test_rows_that_ask_for_nothing_ignore_the_state_of_their_slot():
    logits = random_logits(2)
    hostile = SamplingParams(
        temperature=0.0, logit_bias={1: 100.0}, presence_penalty=2.0, min_tokens=9
    )
    state = empty_state()
    for slot in (0, 1):
        admission = pack_admission(hostile, VOCAB, [5], [1, 2], eos_token_ids=[7])
        state = run_admit(state, slot, admission)
    before = np.asarray(state.seen[0])
    plain, state = sample(logits, [reference.GREEDY, hostile], slots=[0, 1], state=state)
    assert plain.token_ids[0] == logits[0].argmax()
    assert plain.token_ids[1] == 1
    np.testing.assert_array_equal(before, state.seen[0])


@pytest.mark.parametrize("vocab", [12, 1500])
def test_logprobs_describe_the_raw_distribution(vocab):
    params = [
        SamplingParams(logprobs=20, temperature=1.7, logit_bias={3: 4.0}),
        SamplingParams(logprobs=0, top_k=2),
    ]
    logits = random_logits(2, vocab)
    state = run_admit(reference.empty_state(SLOTS, vocab), 0, pack_admission(params[0], vocab, [1]))
    output, _ = sample(logits, params, slots=[0, 1], state=state)
    for row in (0, 1):
        expected = reference.log_softmax(logits[row])
        token = output.token_ids[row]
        np.testing.assert_allclose(output.logprobs.logprobs[row], expected[token], atol=2e-5)
        assert output.logprobs.ranks[row] == 1 + (logits[row] > logits[row, token]).sum()
        order = np.argsort(-logits[row], kind="stable")[:20]
        count = len(order)
        np.testing.assert_array_equal(output.logprobs.top_ids[row, :count], order)
        np.testing.assert_allclose(
            output.logprobs.top_logprobs[row, :count], expected[order], atol=2e-5
        )
        assert (output.logprobs.top_logprobs[row, count:] == -np.inf).all()


def test_logprobs_of_listed_tokens():
    ids = (1499, 0, 700)
    params = [SamplingParams(logprob_token_ids=ids), SamplingParams(logprobs=3)]
    logits = random_logits(2, 1500)
    output, _ = sample(logits, params)
    np.testing.assert_array_equal(output.logprobs.top_ids[0, :3], ids)
    expected = reference.log_softmax(logits[0])[list(ids)]
    np.testing.assert_allclose(output.logprobs.top_logprobs[0, :3], expected, atol=2e-5)
    alone, _ = sample(logits, [SamplingParams(logprobs=3)] * 2)
    np.testing.assert_array_equal(output.logprobs.top_ids[1], alone.logprobs.top_ids[1])


def test_logprobs_are_zero_unless_asked_for():
    logits = random_logits(2)
    output, _ = sample(logits, [SamplingParams()] * 2)
    assert all(not leaf.any() for leaf in jax.tree.leaves(output.logprobs))
    output, _ = sample(logits, [SamplingParams(logprobs=0)] * 2)
    assert (output.logprobs.ranks > 0).all() and not output.logprobs.top_ids.any()


def _entry(program):
    """The text of a compiled program's entry computation: what runs whatever the flags say."""
    return re.search(r"^ENTRY.*?^}", program, re.MULTILINE | re.DOTALL).group()


def _general_shapes(vocab, rows):
    """What `general` takes."""
    return (
        jax.ShapeDtypeStruct((rows, vocab), jnp.float32),
        jax.eval_shape(lambda: reference.empty_state(SLOTS, vocab)),
        jax.ShapeDtypeStruct((rows, NUM_FIELDS), jnp.int32),
        jax.ShapeDtypeStruct((rows, mask_words(vocab)), jnp.int32),
    )


def test_no_program_sorts_the_vocabulary_and_top_k_is_only_behind_conditions():
    shapes = _general_shapes(vocab=8192, rows=4)
    programs = {
        "greedy": jax.jit(greedy).lower(shapes[0]).compile().as_text(),
        "general": jax.jit(general).lower(*shapes).compile().as_text(),
    }
    for program in programs.values():
        assert not re.search(r"\[\d+,\d{3,}\]\S* sort\(", program)
        assert not re.search(r"top-?k", _entry(program), re.IGNORECASE)
    assert re.search(r"top-?k", programs["general"], re.IGNORECASE)


def test_unused_stages_leave_the_state_alone_and_out_of_the_entry_computation():
    vocab, rows = 8192, 4
    shapes = _general_shapes(vocab, rows)
    compiled = jax.jit(general, donate_argnums=1).lower(*shapes).compile()
    entry = _entry(compiled.as_text())
    # Gathers of whole vocabulary rows from the state belong inside the loops of their stages.
    assert not re.search(rf"\[{rows},(1,)?{vocab}\]\S* (fusion|gather)\(%?state", entry)
    # And so does what unpacks masks, which are only handed to it.
    assert not re.search(r"(fusion|broadcast|shift\S*|reshape)\(\S*masks", entry)
    # The donated state is updated in place: temporaries hold a few [rows, vocab], no state array.
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * (SLOTS + 1) * vocab * 4


# Masks


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, VOCAB])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_masked_row_samples_what_its_mask_allows_and_nothing_else(vocab, data):
    """The tokens allowed are all that has a chance, and the rows beside are as without masks."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    logits = random_logits(4, vocab, seed=5)
    allowed = rng.random((4, vocab)) < rng.choice([0.01, 0.5, 1.0], size=(4, 1))
    allowed[np.arange(4), rng.integers(vocab, size=4)] = True
    bits = np.zeros((4, mask_words(vocab) * 32), np.bool_)
    bits[:, :vocab] = allowed
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    greedy_params = SamplingParams(temperature=0)
    sampled_params = SamplingParams(temperature=1.5, logprobs=1)
    form = {"structured_outputs": {"json_object": True}}
    params = [
        dataclasses.replace(greedy_params, **form),
        greedy_params,
        dataclasses.replace(sampled_params, **form),
        sampled_params,
    ]
    state = empty_state(vocab)
    output, _ = sample(logits, params, masks=masks, state=state)
    best = np.where(allowed, logits, -np.inf).argmax(axis=1)
    assert output.token_ids[0] == best[0]
    assert allowed[2, output.token_ids[2]]
    assert output.token_ids[1] == logits[1].argmax()
    again, _ = sample(logits, params, masks=np.where([[1], [0], [1], [0]], masks, 0), state=state)
    np.testing.assert_array_equal(again.token_ids, output.token_ids)
    # Log probabilities are of the raw distribution.
    raw = jax.nn.log_softmax(logits[2])[output.token_ids[2]]
    assert output.logprobs.logprobs[2] == pytest.approx(float(raw), abs=1e-4)


def test_a_mask_that_allows_nothing_leaves_no_token():
    params = [SamplingParams(temperature=t, structured_outputs={"regex": "a"}) for t in (0, 1)]
    output, _ = sample(random_logits(2), params)
    assert output.token_ids.tolist() == [NO_TOKEN, NO_TOKEN]


def test_a_mask_goes_together_with_bias_bans_and_penalties():
    """All that is forbidden stays so, and of the rest the best after them is taken."""
    vocab = 64
    logits = np.zeros((1, vocab), np.float32)
    logits[0, [1, 2, 4, 5]] = 9.0, 8.0, 7.0, 6.0
    params = SamplingParams(
        temperature=0,
        allowed_token_ids=(1, 2, 4, 5),
        logit_bias={5: 0.5},
        presence_penalty=2.0,
        structured_outputs={"regex": "a"},
    )
    state = run_admit(empty_state(vocab), 0, pack_admission(params, vocab, [7], [4]))
    masks = np.array([[1 << 2 | 1 << 3 | 1 << 4 | 1 << 5, -1]], np.int32)
    output, _ = sample(logits, [params], slots=[0], state=state, masks=masks)
    assert output.token_ids.tolist() == [2]
    masks[0, 0] &= ~(1 << 2)
    output, _ = sample(logits, [params], slots=[0], state=state, masks=masks)
    assert output.token_ids.tolist() == [5]  # 6.5, where token 4 has 7 - 2
