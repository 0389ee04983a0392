"""Untrusted model files: whatever they hold, opening them ends soon, and in a typed error."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import CONFIG, random_tensors, write_gguf, write_hf

from jaxserve.core.errors import ModelError, WeightsError
from jaxserve.core.model_files import MAX_TEXT_BYTES
from jaxserve.models.loading.checkpoint import open_checkpoint

BOUND_S = 20.0
"""For any one file; most take milliseconds."""

DEEP = "[" * 100_000


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


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory, tensors) -> bytes:
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", CONFIG, tensors)
    return path.read_bytes()


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
