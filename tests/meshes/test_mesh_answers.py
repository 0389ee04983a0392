"""Every mesh answers as one device does: greedy, sampled, scored, preempted, from cached pages."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from exhaustive import combination, combinations_but, exhaustive
from mesh_engines import load, on_mesh, write_llama
from mesh_workload import check_answers, check_greedy, tokens
from tiny_checkpoints import CONFIG
from tiny_engines import Arrival, TinyModel, drive

from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.models.drafters import eagle, eagle3
from jaxserve.models.drafters.eagle3 import Eagle3Config
from jaxserve.models.drafters.medusa import MedusaConfig
from jaxserve.models.loading.drafters.eagle import save_layer
from jaxserve.models.loading.drafters.eagle3 import save_layer as save_layer3
from jaxserve.models.loading.drafters.medusa import save_heads
from jaxserve.scheduler.policies import POLICIES

pytestmark = pytest.mark.meshes

# Where there are several sizes of prefill, a step goes through programs of another than its own.
# A program of a whole step of CP compiles longest, for its layers are written out with all ranks.
MESHES = {
    "TP2": {"dual_batch_overlap": "on"},
    "TP4": {"sequence_parallel": True},
    "PP2": {"max_num_batched_tokens": 2 + 64},
    "PP4": {"max_num_seqs": 4, "program_scope": "layer"},
    "CP2": {"program_scope": "layer"},
    "CP4": {"page_size": 16},
    "TP4 PP2": {"sequence_parallel": True},
    "TP2 CP2": {"sequence_parallel": True, "program_scope": "layer"},
    "PP2 CP2": {"max_num_batched_tokens": 2 + 64},
    "TP2 PP2 CP2": {"program_scope": "layer"},
}


@pytest.mark.parametrize("mesh", combinations_but(MESHES, "TP2", "PP2", "TP2 PP2 CP2"))
def test_a_mesh_answers_as_one_device(answered, mesh):
    on_mesh(mesh, check_answers, answered, **MESHES[mesh])


@pytest.mark.parametrize(
    ("mesh", "method"),
    [
        combination("TP2", "draft_model"),
        combination("CP2", "layer_skip"),
        combination("TP2 CP2", "lookahead"),
        combination("TP2", "eagle tree"),
        ("TP2 CP2", "eagle3"),
        ("TP2 PP2", "ngram"),
        combination("TP2 PP2", "medusa"),
    ],
)
def test_speculation_on_a_mesh(answered, mesh, method, tmp_path):
    keys = {
        "ngram": {"prompt_lookup_min": 1},
        "draft_model": {"model": str(answered / "model")},
        "layer_skip": {"num_layers": 2},
        "eagle": {"model": str(tmp_path)},
        "eagle tree": {
            "method": "eagle",
            "model": str(tmp_path),
            "num_speculative_tokens": 4,
            "top_k": 2,
            "depth": 2,
        },
        "eagle3": {"model": str(tmp_path)},
        "medusa": {
            "model": str(tmp_path),
            "num_speculative_tokens": 4,
            "speculative_token_tree": [2, 1],
        },
        "lookahead": {},
    }
    settings = {
        "speculative_config": {"method": method, "num_speculative_tokens": 2} | keys[method],
        "max_num_batched_tokens": 2 * 3 + 16,
        "program_scope": "step" if method == "draft_model" else "layer",
    }
    if "PP" in mesh and method == "medusa":
        del settings["speculative_config"]["speculative_token_tree"]
        settings["speculative_config"]["num_speculative_tokens"] = 2
    elif method in ("medusa", "eagle tree"):
        settings |= {"max_num_batched_tokens": 2 * 5 + 16, "pages": 20}
    if method == "medusa":
        model = TinyModel.open(answered / "model").config
        heads = MedusaConfig(2, 1, model.hidden_size, model.vocab_size)
        blocks = np.random.default_rng(3).normal(0, 0.2, (2, *[model.hidden_size] * 2))
        save_heads(tmp_path, heads, np.float32(blocks))
    if method == "draft_model":
        settings["pages"] = 2 * 18  # A page holds the draft model's layers too.
    if method.startswith("eagle"):
        settings["pages"] = 25 if "tree" in method else 23  # Of one layer more than the four.
        config = eagle.layer_for(TinyModel.open(answered / "model").config)
        own, rng = Eagle3Config((1, 3), 101, mapped=False), np.random.default_rng(3)
        specs = eagle.param_specs(config, biased=False)
        specs = eagle3.param_specs(config, own) if method == "eagle3" else specs
        layer = jax.tree.map(lambda spec: np.float32(rng.normal(0, 0.2, spec.shape)), specs)
        if method == "eagle3":
            save_layer3(tmp_path, config, own, layer)
        else:
            save_layer(tmp_path, config, layer)
    on_mesh(mesh, check_answers, answered, **settings)


@pytest.mark.parametrize(
    ("acceptance", "method"),
    [
        ("rejection", "layer_skip"),
        combination("rejection", "medusa"),
        combination("typical", "layer_skip"),
    ],
)
def test_rules_of_acceptance_on_a_mesh(tmp_path, acceptance, method):
    """Ranks that have parts of the vocabulary, here of 31 and 30 tokens, draw as one device."""
    path = write_llama(tmp_path / "model", vocab_size=61)
    drafts = {"method": method, "num_speculative_tokens": 3, "acceptance": acceptance}
    if method == "medusa":
        heads = MedusaConfig(2, 1, CONFIG["hidden_size"], 61)
        blocks = np.random.default_rng(3).normal(0, 0.1, (2, *[heads.hidden_size] * 2))
        save_heads(tmp_path / "heads", heads, np.float32(blocks))
        drafts |= {"model": str(tmp_path / "heads"), "speculative_token_tree": [2, 1]}
        drafts["num_speculative_tokens"] = 4
    else:
        drafts["num_layers"] = 1
    on_mesh("TP2", check_rule, path, drafts)


def check_rule(mesh: str, path: Path, drafts: dict[str, object]) -> None:
    model, found = TinyModel.open(path), []
    sampled = SamplingParams(temperature=0.7, top_k=40, seed=5, n=2, max_tokens=30, ignore_eos=True)
    for each in ("", mesh):
        budget = {"max_num_batched_tokens": 2 * 5 + 16, "speculative_config": drafts}
        with load(model, each, **budget, program_scope="layer") as llm:
            arrivals = [Arrival(model.prompts[index], sampled) for index in (3, 8)]
            outputs = drive(llm.engine, arrivals)
            counts = [outputs[0].metrics.num_draft_tokens, outputs[0].metrics.num_accepted_tokens]
            found.append(([tokens(output) for output in outputs], counts))
    assert found[0] == found[1]
    assert 0 < counts[1] < counts[0]


@pytest.mark.parametrize(("mesh", "scope"), [("TP2 CP4", "layer"), combination("TP2 CP4", "step")])
def test_keys_go_around_a_ring(answered, mesh, scope):
    """A first chunk of 32 tokens is better kept where it is."""
    on_mesh(mesh, check_ring, answered, scope)


def check_ring(mesh: str, directory: Path, scope: str) -> None:
    model = TinyModel.open(directory / "model")
    with load(model, mesh, max_num_batched_tokens=2 + 32, program_scope=scope) as llm:
        runner, ring = llm.engine._runner, []
        forward = runner._forward

        def counted(key):
            ring.append(key.ring)
            return forward(key)

        runner._forward = counted
        check_greedy(model, llm.engine)
        assert any(ring) and not all(ring)


FAMILIES = {
    "gemma2": "TP2 CP2",
    "gemma3": "TP2",
    "llama_biases": "TP4 CP2",
    "llama_mqa": "TP4 CP2",
    "mistral": "TP2 PP2 CP2",
    "olmo2": "TP2 PP2 CP2",
    "phi3": "TP4 PP2",
    "qwen2": "TP4 CP2",
    "qwen3": "TP2 PP2 CP2",
    "smollm2": "TP4 CP2",
    "smollm3": "TP2 CP2",
}
"""Members of every family, KV heads fewer than ranks and heads that do not divide among them."""


@pytest.mark.parametrize("member", combinations_but(FAMILIES, "gemma2", "llama_biases"))
def test_a_family_on_a_mesh(tmp_path, member):
    on_mesh(FAMILIES[member], check_member, tmp_path, member)


def check_member(mesh: str, directory: Path, member: str) -> None:
    model = TinyModel.write_member(directory, member)
    with load(model, mesh) as llm:
        check_greedy(model, llm.engine)


def test_nothing_divides(tmp_path):
    """Three KV heads of three queries, 61 tokens in the vocabulary and 83 in the MLP, on four."""
    path = write_llama(
        tmp_path / "model",
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=61,
        intermediate_size=83,
    )
    on_mesh("TP4 PP2", check_model, path)


def test_heads_over_all_of_which_is_normed_do_not_divide(tmp_path):
    """OLMo 2's norm counts the heads there are, not padding or copies."""
    on_mesh("TP8", check_member, tmp_path, "olmo2")


def check_model(mesh: str, path: Path, **settings: object) -> None:
    model = TinyModel.open(path)
    with load(model, mesh, **settings) as llm:
        check_greedy(model, llm.engine)


@exhaustive
def test_every_policy_on_a_mesh(answered):
    on_mesh("TP2 PP2", check_policies, answered)


def check_policies(mesh: str, directory: Path) -> None:
    for scheduler in POLICIES:
        check_model(mesh, directory / "model", scheduler=scheduler, dual_batch_overlap="on")


def test_pages_of_a_mesh_are_swapped_and_their_books_kept(answered):
    on_mesh("TP2 PP2 CP2", check_swap, answered)


def check_swap(mesh: str, directory: Path) -> None:
    model = TinyModel.open(directory / "model")
    settings = {"debug_kv": True, "host_pages": 20, "preemption": "swap"}
    with load(model, mesh, **settings) as llm:
        check_greedy(model, llm.engine)
        kinds = llm.engine.get_metrics()["jaxserve:kv_preemptions_total"].value
        assert kinds["recompute"] == 0 < kinds["swap"]
