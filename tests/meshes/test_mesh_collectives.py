"""What devices say to each other in a step, as compiled: how often, of what kind, and how much."""

from __future__ import annotations

import collections
import math
import re
from pathlib import Path

import pytest
from mesh_engines import PAGE_SIZE, SEQS, degrees, on_mesh, write_llama

from jaxserve.core.settings.config import EngineConfig
from jaxserve.runtime.program_kinds import ProgramKinds
from jaxserve.runtime.programs.shapes.program import ProgramShapes
from jaxserve.runtime.startup import engine_plan

pytestmark = pytest.mark.meshes

LAYERS, TOKENS = 2, 16
_COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)\("
)
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")
DECODE, PREFILL, RING = f"{SEQS}-0", f"0-{TOKENS}", f"0-{TOKENS}-ring"


class Compiled:
    """Programs of a model with `LAYERS` layers on each stage of `mesh`."""

    def __init__(self, mesh: str, path: Path, **settings: object) -> None:
        config = EngineConfig(
            model=path,
            max_num_seqs=SEQS,
            max_num_batched_tokens=SEQS + TOKENS,
            page_size=PAGE_SIZE,
            program_scope="step",
            **degrees(mesh),
            **settings,
        )
        self.shapes: ProgramShapes = engine_plan.plan_engine(config).shapes
        self._specs = {spec.name: spec for spec in ProgramKinds(self.shapes).specs()}

    def kinds(self, name: str) -> dict[str, int]:
        """Collectives of a program by kind; what it gathers is no weight and no pool."""
        found = _COLLECTIVE.findall(self._specs[name].lower().compile().as_text())
        self._check_sizes(found)
        return dict(collections.Counter(kind for _, kind in found))

    def _check_sizes(self, found: list[tuple[str, str]]) -> None:
        """A gather's result is of a step's tokens: queries, keys and values, or logits."""
        model = self.shapes.model
        features = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        most = TOKENS * max(features, model.vocab_size)
        least_matrix = model.hidden_size * model.num_heads * model.head_dim
        pool = math.prod(self.shapes.kv.abstract[0].k.shape)
        assert most < min(least_matrix, pool)
        for shapes, kind in found:
            if kind == "all-gather":
                sizes = [
                    math.prod(map(int, dims.split(","))) for dims in _SHAPE.findall(shapes) if dims
                ]
                assert max(sizes) <= most


def on_two_layers(tmp_path: Path, mesh: str, check: object) -> None:
    layers = LAYERS * degrees(mesh)["pipeline_parallel_size"]
    on_mesh(mesh, check, write_llama(tmp_path / "model", num_hidden_layers=layers))


def test_tensor_parallelism_sums_twice_a_layer(tmp_path):
    on_two_layers(tmp_path, "TP4", check_tensor)


def check_tensor(mesh: str, path: Path) -> None:
    """And once for the embeddings. The most likely token is found among ids and logits alone."""
    whole = Compiled(mesh, path)
    for key in (DECODE, PREFILL):
        assert whole.kinds(f"forward-{key}") == {"all-reduce": 2 * LAYERS + 1}
    assert whole.kinds(f"greedy-{SEQS}") == {"all-gather": 2}
    # Gathered are candidates of the filters, each rank's winner and its score, and the top logprobs
    # with their ids. Reduced are maxima and sums of each row, and logits of listed tokens; no rank
    # sees another's logits.
    assert whole.kinds(f"general-{SEQS}") == {"all-gather": 5, "all-reduce": 6}

    apart = Compiled(mesh, path, sequence_parallel=True)
    assert apart.kinds(f"forward-{DECODE}") == {"all-reduce": 2 * LAYERS + 1}
    assert apart.kinds(f"forward-{PREFILL}") == {
        "all-gather": 2 * LAYERS + 1,  # all tokens again for the final norm
        "reduce-scatter": 2 * LAYERS,
        "all-reduce": 1,
    }


def test_a_pipeline_hands_on_once_a_step(tmp_path):
    on_two_layers(tmp_path, "PP2", check_stages)


def check_stages(mesh: str, path: Path) -> None:
    """Two sums: of the embeddings, which all stages share, and of what the last one has."""
    compiled = Compiled(mesh, path)
    for key in (DECODE, PREFILL):
        assert compiled.kinds(f"pipeline-step-{key}") == {"collective-permute": 1, "all-reduce": 2}


def test_sequence_parallelism_sends_queries_or_keys(tmp_path):
    on_two_layers(tmp_path, "CP4", check_sequence)


def check_sequence(mesh: str, path: Path) -> None:
    compiled, ranks = Compiled(mesh, path), degrees(mesh)["context_parallel_size"]
    # A maximum and a sum merge what ranks found; one sum picks the tokens to sample from.
    assert compiled.kinds(f"forward-{DECODE}") == {"all-reduce": 2 * LAYERS + 1}
    assert compiled.kinds(f"forward-{PREFILL}") == {
        "all-gather": LAYERS,
        "all-reduce": LAYERS + 1,
        "reduce-scatter": LAYERS,
    }
    assert compiled.kinds(f"forward-{RING}") == {
        "all-gather": LAYERS,  # new keys and values, to be written
        "collective-permute": 2 * (ranks - 1) * LAYERS,
        "all-reduce": 1,
    }


def test_parallel_forms_add_up(tmp_path):
    on_two_layers(tmp_path, "TP2 PP2 CP2", check_all)


def check_all(mesh: str, path: Path) -> None:
    compiled = Compiled(mesh, path)
    assert compiled.kinds(f"pipeline-step-{DECODE}") == {
        "all-reduce": (2 + 2) * LAYERS + 3,
        "collective-permute": 1,
    }
    assert compiled.kinds(f"pipeline-step-{PREFILL}") == {
        "all-gather": LAYERS,
        "all-reduce": (2 + 1) * LAYERS + 3,
        "reduce-scatter": LAYERS,
        "collective-permute": 1,
    }
