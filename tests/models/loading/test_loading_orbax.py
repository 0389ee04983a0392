"""Conversion to Orbax, and loading onto several devices."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from patience import PATIENCE_S
from tiny_checkpoints import CONFIG, random_tensors, write_gguf, write_hf

from jaxserve.core.errors import ModelError, WeightsError
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.convert import convert
from jaxserve.models.loading.params import load_params
from jaxserve.models.registry import param_specs

# After a failed read, Orbax's threads report to an event loop that is already closed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def load(path, dtype="float32"):
    checkpoint = open_checkpoint(path)
    return load_params(checkpoint, param_specs(checkpoint.config), dtype=dtype)


def assert_equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = write_hf(tmp_path_factory.mktemp("hf"), CONFIG, random_tensors(CONFIG), shards=2)
    generation = {"eos_token_id": [2, 5], "temperature": 0.6}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    return convert(source, tmp_path_factory.mktemp("orbax") / "model")


def test_round_trip(source, converted):
    assert_equal(load(converted), load(source))
    checkpoint = open_checkpoint(converted)
    assert checkpoint.format == "orbax"
    assert checkpoint.config == open_checkpoint(source).config
    assert checkpoint.config.eos_token_ids == (2, 5)
    text = "any text"
    assert checkpoint.tokenizer().encode(text) == open_checkpoint(source).tokenizer().encode(text)
    assert [path.name for path in converted.parent.iterdir()] == ["model"]


def test_a_destination_that_cannot_be_written(source, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match="file/model cannot be written"):
        convert(source, tmp_path / "file" / "model")


def test_stored_dtype_and_loaded_dtype(source, tmp_path):
    convert(source, tmp_path / "half", dtype="bfloat16")
    assert_equal(load(tmp_path / "half", "bfloat16"), load(source, "bfloat16"))
    assert str(load(tmp_path / "half")["embed"].dtype) == "float32"


def test_from_gguf(tmp_path):
    gguf = write_gguf(tmp_path / "m.gguf", CONFIG, random_tensors(CONFIG))
    converted = convert(gguf, tmp_path / "model")
    assert_equal(load(converted), load(gguf))
    assert open_checkpoint(converted).config == open_checkpoint(gguf).config
    ours, theirs = open_checkpoint(converted).tokenizer(), open_checkpoint(gguf).tokenizer()
    assert ours.encode("ab a b") == theirs.encode("ab a b")


def test_a_destination_in_use(source, tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ModelError, match="already exists"):
        convert(source, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    (tmp_path / "empty").mkdir()
    assert open_checkpoint(convert(source, tmp_path / "empty")).format == "orbax"


def test_nothing_is_left_of_a_conversion_that_fails(source, tmp_path):
    broken = shutil.copytree(source, tmp_path / "broken")
    (broken / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        convert(broken, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_fingerprint_follows_the_files(source, converted, tmp_path):
    other = convert(source, tmp_path / "other", dtype="bfloat16")
    assert open_checkpoint(converted).fingerprint == open_checkpoint(converted).fingerprint
    assert open_checkpoint(converted).fingerprint != open_checkpoint(other).fingerprint


def test_config_that_does_not_match(converted, tmp_path):
    changed = shutil.copytree(converted, tmp_path / "changed")
    (changed / "config.json").write_text(json.dumps(CONFIG | {"intermediate_size": 128}))
    with pytest.raises(WeightsError, match=r"layers\.0\.down is stored with shape \(64, 96\)"):
        open_checkpoint(changed)


@pytest.mark.parametrize("damage", ["_METADATA", "manifest.ocdbt"])
def test_damaged_files(converted, tmp_path, damage):
    damaged = shutil.copytree(converted, tmp_path / "damaged")
    (damaged / "params" / damage).write_bytes(b"")
    with pytest.raises(WeightsError, match="cannot be read as an Orbax checkpoint"):
        load(damaged)


SHARDED = """
import sys
import jax, numpy as np
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.params import load_params
from jaxserve.models.registry import get_family, param_specs
from sharding_rules import named_sharding

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
mesh = jax.make_mesh((4,), ("tensor",))

def place(spec):
    return named_sharding(mesh, spec.axes, spec.shape)

def assert_equal(left, right):
    left, right = jax.device_get((left, right))
    jax.tree.map(np.testing.assert_array_equal, left, right)

for path in sys.argv[1:]:
    checkpoint = open_checkpoint(path)
    family = get_family(checkpoint.config.architecture)
    specs = family.param_specs(checkpoint.config)
    shardings = jax.tree.map(place, specs)
    sharded = load_params(checkpoint, specs, dtype="float32", shardings=shardings)
    whole = load_params(checkpoint, specs, dtype="float32")
    assert_equal(sharded, whole)
    qkv = sharded["layers"][0]["qkv"]
    assert {shard.data.shape for shard in qkv.addressable_shards} == {(1, 4, 16, 64)}, qkv
    assert len(qkv.sharding.device_set) == 4
    assert len(whole["embed"].sharding.device_set) == 1

dummy = open_checkpoint(sys.argv[1], "dummy")
spec = {"embed": specs["embed"]}
alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
sharded = dummy.restore(spec, np.dtype("float32"), {"embed": place(specs["embed"])})
assert {shard.data.shape for shard in sharded["embed"].addressable_shards} == {(64, 64)}
assert_equal(sharded, dummy.restore(spec, np.dtype("float32"), {"embed": alone}))
print("sharded equals whole")
"""


def test_shards_go_to_their_devices(source, converted):
    """In a process of its own, because the number of devices is fixed when JAX starts."""
    done = subprocess.run(
        [sys.executable, "-c", SHARDED, str(source), str(converted)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout.strip() == "sharded equals whole", done.stderr


def test_what_is_no_regular_file_is_never_opened(converted, tmp_path):
    shutil.copytree(converted, tmp_path / "model")
    os.mkfifo(tmp_path / "model" / "params" / "more")
    with pytest.raises(ModelError, match="it is a FIFO, not a regular file"):
        open_checkpoint(tmp_path / "model")
