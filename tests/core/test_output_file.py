from __future__ import annotations

import os

import pytest

from jaxserve.core.errors import ConfigError
from jaxserve.core.process.output_file import check_output_file


def test_what_can_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").write_text("is replaced")
    for path in (tmp_path / "new", str(tmp_path / "old"), "new", os.devnull):
        check_output_file("plot", path)
    assert (tmp_path / "old").read_text() == "is replaced"
    assert not (tmp_path / "new").exists()


def test_a_directory_and_a_file_in_none_are_refused_by_name(tmp_path):
    for path in (tmp_path, tmp_path / "no" / "file"):
        with pytest.raises(ConfigError, match=f"plot is '{path}'.*an existing directory"):
            check_output_file("plot", path)


def test_what_belongs_to_others_is_refused(tmp_path):
    path = tmp_path / "theirs"
    path.touch()
    path.chmod(0o444)
    if os.access(path, os.W_OK):
        pytest.skip("this user may write anything")
    with pytest.raises(ConfigError, match="not writable by this user"):
        check_output_file("plot", path)
