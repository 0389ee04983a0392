"""The cache directory: downloaded models and compiled programs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from jaxserve.core.errors import ConfigError


def cache_directory() -> Path:
    """The cache directory, created with mode 0700 if absent.

    `$JAXSERVE_CACHE`, else `jaxserve` under `$XDG_CACHE_HOME`, else `~/.cache/jaxserve`. A user who
    can write there can make this process run arbitrary programs, so a directory that belongs to
    another user, or that others can write to, raises ConfigError.
    """
    path = _location()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the cache directory {path} cannot be created ({error.strerror}); "
            "set JAXSERVE_CACHE to a writable directory."
        ) from error
    if hasattr(os, "geteuid"):
        _check_private(path)
    return path


def _location() -> Path:
    if chosen := os.environ.get("JAXSERVE_CACHE"):
        return Path(chosen).expanduser().absolute()
    # The XDG specification requires relative paths to be ignored.
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "jaxserve"


def _check_private(path: Path) -> None:
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"the cache directory {path} belongs to user {status.st_uid}, but this process runs "
            f"as user {os.geteuid()}; set JAXSERVE_CACHE to a directory of your own."
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"the cache directory {path} is writable by other users "
            f"(mode {stat.S_IMODE(status.st_mode):04o}); run: chmod 700 {path}"
        )
