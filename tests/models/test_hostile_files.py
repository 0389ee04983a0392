"""Model files from anybody: whatever they hold, opening them ends soon, and in a typed error."""

from __future__ import annotations

import copy
import json
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tiny_checkpoints import CONFIG, random_tensors, write_gguf, write_hf

from jaxserve.core.errors import JaxserveError, ModelError, WeightsError
from jaxserve.core.model_files import MAX_TEXT_BYTES
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.directory import config_from_files
from jaxserve.models.loading.gguf_config import ARCHITECTURES as GGUF_ARCHITECTURES
from jaxserve.models.loading.gguf_header import read_gguf
from jaxserve.models.registry import ARCHITECTURES, param_specs
from jaxserve.text.tokenizer import Tokenizer

FUZZ = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
BOUND_S = 5.0
"""For any one file; most take milliseconds."""

# Numbers that JSON can write, and Python reads as they are.
NUMBERS = st.sampled_from([0, -1, 1, 2, 3, 1.5, 10**6, 10**12, 10**18, -(10**18), 10**400]) | (
    st.sampled_from([float("inf"), float("-inf"), float("nan"), 1e308, 5e-324])
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
DEEP = "[" * 100_000


@contextmanager
def soon_or_refused() -> Iterator[None]:
    """Passes for a block that works or raises an error of ours, within the bound."""
    begin = time.monotonic()
    try:
        yield
    except JaxserveError as error:
        assert len(str(error)) < 4000
    assert time.monotonic() - begin < BOUND_S


@pytest.fixture(scope="module")
def tensors() -> dict[str, Any]:
    return random_tensors(CONFIG)


@pytest.fixture
def directory(tmp_path, tensors) -> Path:
    return write_hf(tmp_path / "model", CONFIG, tensors, shards=2)


INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


@pytest.mark.parametrize("value", [10**6, 10**9, 10**18, 10**400, float("inf")])
@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_bounded_before_anything_has_them(directory, name, value):
    if value == 10**6 and name in ("vocab_size", "max_position_embeddings", "intermediate_size"):
        return  # as some models have
    config = json.dumps(CONFIG | {name: value})
    (directory / "config.json").write_text(config.replace("Infinity", "1e400"))
    begin = time.monotonic()
    for load_format in ("auto", "dummy"):
        with pytest.raises(ModelError, match=f"config.json has {name} .* at most"):
            open_checkpoint(directory, load_format)
    assert time.monotonic() - begin < BOUND_S


def test_the_largest_model_that_is_read_is_read_soon(directory):
    """The bounds are such that a config within them costs little."""
    largest = {"num_hidden_layers": 4096, "num_attention_heads": 4096, "hidden_size": 1 << 18}
    largest |= {"num_key_value_heads": 4096, "vocab_size": 1 << 24, "intermediate_size": 1 << 20}
    (directory / "config.json").write_text(json.dumps(CONFIG | largest | {"head_dim": 8192}))
    begin = time.monotonic()
    with pytest.raises(WeightsError, match="do not match its config"):
        open_checkpoint(directory)
    assert time.monotonic() - begin < BOUND_S


@FUZZ
@given(
    architecture=st.sampled_from(sorted(ARCHITECTURES)),
    changes=st.dictionaries(
        st.sampled_from(
            (
                *CONFIG,
                "_name_or_path",
                "attention_bias",
                "bos_token_id",
                "hidden_act",
                "layer_types",
                "max_window_layers",
                "mlp_bias",
                "no_rope_layer_interval",
                "no_rope_layers",
                "pad_token_id",
                "partial_rotary_factor",
                "quantization_config",
                "rope_parameters",
                "rope_scaling",
                "sliding_window",
                "use_sliding_window",
            )
        ),
        VALUES,
        min_size=1,
        max_size=3,
    ),
)
def test_any_config(architecture, changes):
    with soon_or_refused():
        raw = CONFIG | {"architectures": [architecture]} | changes
        param_specs(config_from_files({"config.json": raw}))


ROPE_KINDS = ["linear", "dynamic", "llama3", "yarn", "longrope", "default", "spiral"]


@FUZZ
@given(
    kind=st.sampled_from(ROPE_KINDS),
    fields=st.dictionaries(
        st.sampled_from(
            (
                "factor",
                "original_max_position_embeddings",
                "low_freq_factor",
                "beta_fast",
                "high_freq_factor",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "truncate",
                "attention_factor",
                "rope_theta",
                "short_factor",
                "long_factor",
            )
        ),
        NUMBERS | st.floats() | VALUES | st.just([1e-308] * 8),
    ),
)
def test_any_rope_scaling(kind, fields):
    with soon_or_refused():
        raw = CONFIG | {"rope_scaling": {"rope_type": kind} | fields}
        config_from_files({"config.json": raw})


@FUZZ
@given(
    generation=st.dictionaries(
        st.sampled_from(
            (
                "temperature",
                "top_k",
                "top_p",
                "min_p",
                "repetition_penalty",
                "max_new_tokens",
                "do_sample",
                "eos_token_id",
            )
        ),
        VALUES,
    )
)
def test_any_generation_config(generation):
    with soon_or_refused():
        config_from_files({"config.json": CONFIG, "generation_config.json": generation})


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        INDEX,
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
    ],
)
@pytest.mark.parametrize(
    "content", [DEEP, '{"a": ' * 50_000, "{", "[]", "\xff", "1" * 10_000, "", "null"]
)
def test_json_that_is_deep_or_no_object(directory, name, content):
    (directory / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelError, match=name):
        open_checkpoint(directory).tokenizer()


FILES = ["config.json", SHARD, INDEX, "tokenizer.json", "chat_template.jinja"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["fifo", "device", "directory"])
def test_what_is_no_regular_file_is_never_opened(directory, name, kind):
    file = directory / name
    file.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.mkdir()
    begin = time.monotonic()
    with pytest.raises(ModelError, match=r"regular file|no config\.json"):
        open_checkpoint(directory).tokenizer()
    assert time.monotonic() - begin < BOUND_S


def test_weights_that_no_index_names_must_be_regular_too(tmp_path, tensors):
    directory = write_hf(tmp_path / "model", CONFIG, tensors)
    os.mkfifo(directory / "more.safetensors")
    with pytest.raises(ModelError, match=r"more\.safetensors cannot be read: it is a FIFO"):
        open_checkpoint(directory)


def test_a_model_that_is_a_fifo(tmp_path):
    os.mkfifo(tmp_path / "m.gguf")
    for load_format in ("auto", "dummy"):
        with pytest.raises(ModelError, match="it is a FIFO, not a regular file"):
            open_checkpoint(tmp_path / "m.gguf", load_format)


def test_a_file_of_absurd_size_is_not_read(directory):
    with (directory / "config.json").open("r+b") as file:
        file.truncate(MAX_TEXT_BYTES + 1)
    with pytest.raises(ModelError, match="at most 16,777,216 are read"):
        open_checkpoint(directory)


def test_links_within_a_cache_are_followed(directory, tmp_path):
    """Those of Hugging Face's, where a snapshot is made of links to blobs."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in directory.iterdir():
        (snapshot / file.name).symlink_to(Path("..") / directory.name / file.name)
    assert open_checkpoint(snapshot).config == open_checkpoint(directory).config


@pytest.mark.parametrize(
    "name",
    (
        "../other.safetensors",
        "/etc/passwd",
        "/tmp/other.safetensors",
        "a/b.safetensors",
        "..",
        "",
        "config.json",
        "other.safetensors\x00",
        1,
        None,
        ["a"],
    ),
)
def test_an_index_names_files_of_its_directory_only(directory, tensors, name):
    write_hf(directory.parent, CONFIG, tensors)
    (directory.parent / "model.safetensors").rename(directory.parent / "other.safetensors")
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (directory / INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightsError, match="file of the same directory"):
        open_checkpoint(directory)


@FUZZ
@given(content=VALUES | st.fixed_dictionaries({"weight_map": VALUES}))
def test_any_index(directory, content):
    (directory / INDEX).write_text(json.dumps(content))
    with soon_or_refused():
        open_checkpoint(directory)


HEADER_VALUES = VALUES | st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F8_E4M3", "X"]) | VALUES,
        "shape": st.lists(NUMBERS, max_size=5) | VALUES,
        "data_offsets": st.lists(NUMBERS, max_size=3) | VALUES,
    }
)


@FUZZ
@given(
    changes=st.dictionaries(st.sampled_from(["model.norm.weight", "new"]), HEADER_VALUES),
    tail=st.binary(max_size=64),
)
@example(changes={"new": {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 0]}}, tail=b"")
def test_any_safetensors_header(tmp_path, tensors, changes, tail):
    path = tmp_path / "model.safetensors"
    if not path.exists():
        write_hf(tmp_path, CONFIG, tensors)
        (tmp_path / "original").write_bytes(path.read_bytes())
    content = (tmp_path / "original").read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length]) | changes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :] + tail)
    with soon_or_refused():
        open_checkpoint(tmp_path)


@FUZZ
@given(prefix=st.binary(max_size=200))
@example(prefix=struct.pack("<Q", 1 << 63))
@example(prefix=struct.pack("<Q", len(DEEP)) + DEEP.encode())
def test_any_bytes_as_safetensors(tmp_path, prefix):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(prefix)
    with soon_or_refused(), pytest.raises(WeightsError):
        open_checkpoint(tmp_path)


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory, tensors) -> bytes:
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", CONFIG, tensors)
    return path.read_bytes()


@FUZZ
@given(data=st.data())
def test_any_change_in_a_gguf_header(tmp_path, gguf_bytes, data):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes)
    header = len(read_gguf(path).header)
    content = bytearray(gguf_bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header - 1))
        new = data.draw(st.binary(min_size=1, max_size=8) | st.just(b"\xff" * 8))
        content[at : at + len(new)] = new
    path.write_bytes(content)
    with soon_or_refused():
        open_checkpoint(path).tokenizer()


def gguf_string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf_header(fields: int, body: bytes, tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + body


STRING, ARRAY = 8, 9


@pytest.mark.parametrize(
    ("content", "size"),
    [
        (gguf_header(1, gguf_string(b"a") + struct.pack("<IIQ", ARRAY, ARRAY, 1) * 20_000), 0),
        (gguf_header(1, gguf_string(b"a") + struct.pack("<IIQ", ARRAY, STRING, 1 << 40)), 1 << 34),
        (gguf_header(1, gguf_string(b"a") + struct.pack("<IIQ", ARRAY, 0, 1 << 33)), 1 << 34),
        (gguf_header(1, struct.pack("<Q", 1 << 33)), 1 << 34),
        (gguf_header(1 << 40, b""), 1 << 34),
        (gguf_header(0, b"", tensors=1 << 30), 1 << 34),
        (gguf_header(0, gguf_string(b"t") + struct.pack("<I", 1 << 30), tensors=1), 1 << 34),
    ],
)
def test_gguf_headers_that_would_take_long(tmp_path, content, size):
    """Sparse files of 16 GiB: the zeros go on for ever."""
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    os.truncate(path, max(size, len(content)))
    begin = time.monotonic()
    with pytest.raises(WeightsError, match="corrupt in its header"):
        open_checkpoint(path)
    assert time.monotonic() - begin < BOUND_S


GGUF_VALUES = st.recursive(
    st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=4,
)


@FUZZ
@given(data=st.data())
def test_any_gguf_metadata(tmp_path, gguf_bytes, data, monkeypatch):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes)
    file = read_gguf(path)
    keys = [*file.metadata, "tokenizer.chat_template", "tokenizer.chat_templates"]
    keys += [f"tokenizer.ggml.{name}" for name in ("bos_token_id", "eot_token_id", "pre", "scores")]
    keys += [f"llama.{name}" for name in ("rope.scaling.type", "rope.scaling.factor")]
    keys += ["llama.rope.dimension_count", "llama.attention.sliding_window", "general.name"]
    keys += ["general.sampling.temp", "llama.expert_count", "llama.attention.key_length"]
    changes = data.draw(
        st.dictionaries(
            st.sampled_from(keys),
            GGUF_VALUES | st.sampled_from(sorted(GGUF_ARCHITECTURES)),
            min_size=1,
            max_size=3,
        )
    )
    metadata = copy.deepcopy(file.metadata)
    metadata |= changes
    with monkeypatch.context() as patch:
        patch.setattr(
            "jaxserve.models.loading.gguf.read_gguf",
            lambda path: file.__class__(path, metadata, file.tensors, file.header),
        )
        with soon_or_refused():
            open_checkpoint(path).tokenizer()


def test_a_split_model_of_no_files(tmp_path, gguf_bytes):
    path = tmp_path / "m-00000-of-00000.gguf"
    path.write_bytes(gguf_bytes)
    with pytest.raises(WeightsError, match="one of 0 files"):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["m.gguf", "m-00001-of-00002.gguf"])
def test_no_parts_of_a_split_model_but_files(tmp_path, gguf_bytes, name):
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(gguf_bytes)
    os.mkfifo(tmp_path / "m-00002-of-00002.gguf")
    if name == "m.gguf":
        (tmp_path / "m.gguf").symlink_to("m-00002-of-00002.gguf")
    with pytest.raises(ModelError, match=r"missing|regular"):
        open_checkpoint(tmp_path / name)


@FUZZ
@given(
    name=st.sampled_from(
        ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"]
    ),
    content=st.dictionaries(
        st.sampled_from(["chat_template", "bos_token", "eos_token", "unk_token", "eos_token_id"]),
        VALUES
        | st.fixed_dictionaries({"content": VALUES})
        | st.lists(st.fixed_dictionaries({"name": VALUES, "template": VALUES}), max_size=2),
    ),
)
def test_any_tokenizer_config(directory, name, content):
    for other in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        (directory / other).unlink(missing_ok=True)
    (directory / name).write_text(json.dumps(content))
    with soon_or_refused():
        Tokenizer.from_directory(directory)


@FUZZ
@given(
    part=st.sampled_from(["model", "pre_tokenizer", "decoder", "normalizer", "added_tokens"]),
    content=VALUES,
)
def test_any_tokenizer_json(directory, part, content):
    whole = json.loads((directory / "tokenizer.json").read_text())
    (directory / "tokenizer.json").write_text(json.dumps(whole | {part: content}))
    try:
        with soon_or_refused():
            Tokenizer.from_directory(directory)
    finally:
        (directory / "tokenizer.json").write_text(json.dumps(whole))
