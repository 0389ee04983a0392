"""Snapshots on disk: whole, or refused."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.errors import SnapshotError
from jaxserve.engine.snapshot.files import (
    MANIFEST,
    VERSION,
    SnapshotReader,
    SnapshotWriter,
    decoded_rows,
    discard,
    encoded,
    exists,
)

ROWS = np.arange(60, dtype=np.float32).reshape(10, 6)


@pytest.fixture
def written(tmp_path):
    directory = tmp_path / "new" / "snapshot"
    writer = SnapshotWriter(directory)
    writer.add("requests", [{"prompt": "grüße \ud800"}])
    writer.add("kv-00000", ROWS)
    writer.commit({"fingerprint": "abc"})
    return directory


def test_what_is_read_is_what_was_written(written):
    reader = SnapshotReader(written)
    assert reader.facts == {"fingerprint": "abc"}
    assert reader.json("requests") == [{"prompt": "grüße \ud800"}]
    assert reader.has("requests") and not reader.has("kv")
    np.testing.assert_array_equal(reader.rows("kv-00000", 3, 7), ROWS[3:7])
    assert (written.stat().st_mode & 0o777) == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in written.iterdir())


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_rows_of_any_dtype_to_the_last_bit(tmp_path, dtype):
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 4)
    writer = SnapshotWriter(tmp_path)
    writer.add("kv", bits.view(dtype))
    writer.commit({})
    read = SnapshotReader(tmp_path).rows("kv", 0, len(bits))
    assert read.dtype == dtype
    np.testing.assert_array_equal(read.view(np.uint16), bits)
    sent = decoded_rows(encoded("kv", bits.view(dtype))[1])
    assert sent.dtype == dtype
    np.testing.assert_array_equal(sent.view(np.uint16), bits)


def test_the_older_one_counts_until_the_newer_is_whole(written):
    writer = SnapshotWriter(written)
    writer.add("requests", ["newer"])
    assert SnapshotReader(written).json("requests") != ["newer"]
    writer.commit({})
    assert SnapshotReader(written).json("requests") == ["newer"]
    assert len(list(written.iterdir())) == 2  # Nothing of the older is left.


def test_a_discarded_one_is_gone(written):
    assert exists(written)
    discard(written)
    assert not exists(written)
    assert not list(written.iterdir())
    discard(written)


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(SnapshotError, match=r"thesis\.tex"):
        SnapshotWriter(tmp_path)


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError, match="file"):
        SnapshotWriter(tmp_path / "file" / "below")


def test_none_there(tmp_path):
    with pytest.raises(SnapshotError, match=MANIFEST):
        SnapshotReader(tmp_path)


def test_a_newer_version_is_refused_with_both(written):
    manifest = json.loads((written / MANIFEST).read_text())
    (written / MANIFEST).write_text(json.dumps(manifest | {"version": VERSION + 1}))
    with pytest.raises(SnapshotError, match=rf"version {VERSION + 1}, .* up to {VERSION};"):
        SnapshotReader(written)


def test_a_file_that_is_missing(written):
    next(written.glob("*-requests.json")).unlink()
    with pytest.raises(SnapshotError, match=r"requests\.json is missing"):
        SnapshotReader(written)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_changed_byte_or_lost_end_is_noticed(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("damaged")
    writer = SnapshotWriter(directory)
    writer.add("requests", ["a", {"b": 1.5}])
    writer.add("kv-00000", ROWS)
    writer.commit({})
    files = sorted(path for path in directory.iterdir() if path.name != MANIFEST)
    file = data.draw(st.sampled_from(files))
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[place:]
    else:
        content[place] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    with pytest.raises(SnapshotError, match=file.name):
        SnapshotReader(directory)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": "1"}', '{"version": null}'])
def test_a_manifest_that_is_none(written, text):
    (written / MANIFEST).write_text(text)
    with pytest.raises(SnapshotError):
        SnapshotReader(written)
