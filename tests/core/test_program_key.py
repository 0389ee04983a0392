"""The key of the executable cache: of all that shapes a program, and of nothing else."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from quantized_checkpoints import write
from tiny_checkpoints import random_tensors
from tiny_engines import CONTEXT, TinyModel

from jaxserve.core.settings.config import EngineConfig
from jaxserve.runtime.program_kinds import ProgramKinds
from jaxserve.runtime.programs.compilation.program_sources import program_sources
from jaxserve.runtime.programs.shapes.program import ProgramShapes
from jaxserve.runtime.startup import engine_plan

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> TinyModel:
    return TinyModel.write_llama(tmp_path_factory.mktemp("tiny"))


def shapes_of(path: Path, **changes) -> ProgramShapes:
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 18, "page_size": 8}
    return engine_plan.plan_engine(EngineConfig(model=path, **settings | changes)).shapes


def lowered(shapes: ProgramShapes) -> dict[str, str]:
    """The text of every program, by name."""
    return {spec.name: spec.lower().as_text() for spec in ProgramKinds(shapes).specs()}


def test_settings_outside_the_key_change_no_program(model, tmp_path):
    """Lists a value other than the default's for each: a setting is not left out unchecked."""
    plain = shapes_of(model.path)
    pool = plain.num_pages * plain.kv.pages.page_bytes * model.config.num_layers
    changes = {
        "model": shutil.copytree(model.path, tmp_path / "copy"),
        "load_format": "dummy",
        "seed": 1,
        "scheduler": "medha",
        "target_step_us": 7,
        "memory_utilization": 0.5,
        "kv_cache_memory_bytes": pool,
        "compilation_cache": False,
        "fair_share": True,
        "priority_ageing_s": 5,
        "enable_prefix_caching": False,
        "host_kv_bytes": pool,
        "disk_kv_dir": tmp_path,
        "disk_kv_bytes": pool,
        "preemption": "swap",
        "debug_kv": True,
        "devices": [0],
    }
    settings = {field.name for field in dataclasses.fields(EngineConfig)}
    assert set(changes) == settings - set(plain.config.of_programs())
    changed = shapes_of(changes.pop("model"), **changes)
    assert changed.describe() == plain.describe()
    programs, others = lowered(plain), lowered(changed)
    assert programs == {name: others[name] for name in programs}
    assert len(others) > len(programs), "pages move, by programs of other names"


@pytest.mark.parametrize(
    "changes",
    [
        {"max_model_len": CONTEXT // 2},
        {"max_num_seqs": 1},
        {"page_size": 4},
        {"dtype": "bfloat16"},
        {"program_scope": "step"},
        {"attention_backend": "xla"},
        {"quantization": "int8"},
        {"kv_cache_memory_bytes": 1 << 20},
    ],
    ids=str,
)
def test_what_shapes_programs_changes_the_key(model, changes):
    assert shapes_of(model.path, **changes).describe() != shapes_of(model.path).describe()


def test_the_formats_of_a_draft_models_weights_change_the_key(model, tmp_path):
    """Of a directory whose model is quantized later, and has the same config otherwise."""
    raw = json.loads((model.path / "config.json").read_text())
    tensors = random_tensors(raw)
    drafter, keys = tmp_path / "drafter", []
    changes = {
        "speculative_config": {"model": str(drafter), "num_speculative_tokens": 1},
        "max_num_batched_tokens": 36,
    }
    for path in write(tmp_path, raw, tensors, "fp8"):
        shutil.copytree(path, drafter, dirs_exist_ok=True)
        shapes = shapes_of(model.path, **changes)
        keys.append((shapes.describe(), str(shapes.abstract_state.draft_params)))
    (key, params), (other_key, other_params) = keys
    assert params != other_params
    assert key != other_key


def test_all_of_ours_that_runs_while_programs_are_traced_is_digested(model):
    shapes, ran = shapes_of(model.path), set()

    def note(frame, event, argument) -> None:
        if event == "call":
            ran.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        lowered(shapes)
    finally:
        sys.setprofile(None)
    ours = {path for path in map(Path, ran) if path.is_relative_to(ROOT)} - {Path(__file__)}
    assert {"program_kinds.py", "step.py", "llama.py", "sample.py"} <= {path.name for path in ours}
    assert ours <= set(program_sources())


def test_all_of_ours_that_the_program_functions_import_is_digested():
    """As Python imports it, whatever the reader of imports makes of it."""
    script = """
        import sys, jaxserve.runtime.program_kinds, jaxserve.models.registry
        files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
        print(*filter(None, files), sep="\\n")
    """
    script = "\n".join(line.strip() for line in script.splitlines())
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = {path for path in map(Path, done.stdout.split()) if path.is_relative_to(ROOT)}
    files = {path for path in files if not path.is_relative_to(ROOT / "tests")}
    digested = {str(path.relative_to(ROOT)) for path in program_sources()}
    assert {str(path.relative_to(ROOT)) for path in files} <= digested
    assert {
        "jaxserve/kv/layout.py",
        "jaxserve/structured/bitmask.py",
        "sharding_rules/rules.py",
        "pallas_kernels/paged_attention/gpu/attention.py",
        "pallas_kernels/verified.json",
    } <= digested


def test_code_that_shapes_no_program_is_not_digested():
    names = {str(path.relative_to(ROOT)) for path in program_sources()}
    for part in ("server", "cli", "scheduler/scheduler.py", "engine/engine.py", "loadgen", "text"):
        assert not any(name.startswith(f"jaxserve/{part}") for name in names)
