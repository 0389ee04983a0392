"""A log that keeps all records has the drafts of every step, and which of them were accepted."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from exhaustive import combinations_of
from tiny_engines import LONGEST, Arrival, drive

from jaxserve.core.events import Collected
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.models.drafters.medusa import MedusaConfig
from jaxserve.models.loading.drafters.medusa import save_heads

LETTERS = (97, 98, 99)
PARAMS = SamplingParams(
    temperature=1.0, seed=3, max_tokens=LONGEST, ignore_eos=True, allowed_token_ids=LETTERS
)
TREE = [3, 3, 1]
METHODS = {
    "ngram": {"num_speculative_tokens": 3, "prompt_lookup_min": 1},
    "medusa": {"speculative_token_tree": TREE},
}
PARENTS = {
    "ngram": (0, 1, 2),
    "medusa": (0,) * 3 + (1,) * 3 + (2,) * 3 + (3,) * 3 + tuple(range(4, 13)),
}


@pytest.fixture(scope="module")
def load(llama, tmp_path_factory):
    """An LLM that drafts by a method, with a log that keeps all records or not."""
    heads = tmp_path_factory.mktemp("heads")
    shapes = MedusaConfig(3, 1, llama.config.hidden_size, llama.config.vocab_size)
    blocks = np.random.default_rng(6).normal(0, 0.2, (3, *[shapes.hidden_size] * 2))
    save_heads(heads, shapes, blocks.astype(np.float32))

    def loaded(method, **settings):
        model = {"model": str(heads)} if method == "medusa" else {}
        drafts = {"method": method} | model | METHODS[method]
        settings |= {"max_num_seqs": 2, "max_num_batched_tokens": 2 * 22 + 16}
        return llama.load(speculative_config=drafts, **settings)

    return loaded


def steps_of(records, index):
    """Of the sequence that arrived as number `index`: what each step gained, and its drafts."""
    sequence = [record.sequence for record in records if hasattr(record, "max_tokens")][index]
    for record in records:
        if isinstance(record, Collected) and sequence in record.sequences:
            counts = record.counts or [1] * len(record.sequences)
            own = [each for each in record.drafts if each.sequence == sequence]
            yield counts[record.sequences.index(sequence)], own[0] if own else None


@pytest.mark.parametrize("method", combinations_of(METHODS, "medusa"))
def test_the_nodes_that_were_kept_are_the_tokens_of_the_answer(load, llama, tmp_path, method):
    """And a node is accepted with all before it, or the token in its place is another one."""
    with load(method, trace_file=tmp_path / "trace.json") as llm:
        arrivals = [Arrival(llama.prompts[3 + i], PARAMS, 2 * i) for i in range(3)]
        outputs = drive(llm.engine, arrivals)
        records = llm.engine.log.records
    for index, output in enumerate(outputs):
        answer, at, kept = output.outputs[0].token_ids, 0, 0
        for count, drafts in steps_of(records, index):
            if drafts is not None:
                token_ids, parents, accepted = drafts.tree
                assert parents == PARENTS[method][: len(token_ids)]
                assert drafts.num_tokens == sum(token != -1 for token in token_ids)
                assert drafts.num_accepted == len(accepted)
                for last, node in itertools.pairwise((0, *accepted)):
                    assert parents[node - 1] == last
                tokens = [token_ids[node - 1] for node in accepted]
                assert tokens[:count] == list(answer[at : at + len(tokens)])
                following = [
                    token
                    for token, parent in zip(token_ids, parents)
                    if parent == (accepted or (0,))[-1]
                ]
                assert count <= len(tokens) or answer[at + len(tokens)] not in following
                kept += len(accepted)
            at += count
        assert at == len(answer) == LONGEST
        assert kept >= LONGEST // 8


def test_no_drafts_are_read_for_a_log_that_keeps_nothing(load, llama, monkeypatch):
    seen = []
    with load("medusa") as llm:
        log = llm.engine.log
        monkeypatch.setattr(log, "_sinks", (*log._sinks, seen.append))
        drive(llm.engine, [Arrival(llama.prompts[3], PARAMS)])
    drafts = [each for record in seen if isinstance(record, Collected) for each in record.drafts]
    assert drafts and {each.tree for each in drafts} == {None}
