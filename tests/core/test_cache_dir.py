"""Where the cache is, and when it is refused."""

from __future__ import annotations

import os
import stat

import pytest

from jaxserve.core.errors import ConfigError
from jaxserve.core.process.cache_dir import cache_directory


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("JAXSERVE_CACHE", raising=False)
    return tmp_path


def test_private_and_under_the_home_directory(home):
    assert cache_directory() == home / ".cache" / "jaxserve"
    assert stat.S_IMODE(cache_directory().stat().st_mode) == 0o700


def test_xdg_directory(home, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    assert cache_directory() == home / "xdg" / "jaxserve"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory() == home / ".cache" / "jaxserve"


def test_chosen_directory(home, monkeypatch):
    monkeypatch.setenv("JAXSERVE_CACHE", str(home / "mine"))
    assert cache_directory() == home / "mine"


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_writable_by_others(home, mode):
    cache_directory().chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 700"):
        cache_directory()


def test_owned_by_another(home, monkeypatch):
    cache_directory()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        cache_directory()


def test_cannot_be_made(home, monkeypatch):
    (home / "file").write_text("")
    monkeypatch.setenv("JAXSERVE_CACHE", str(home / "file" / "cache"))
    with pytest.raises(ConfigError, match=r"cannot be created.*JAXSERVE_CACHE"):
        cache_directory()
