"""Output files: checks before a run begins, and fsync of directories."""

from __future__ import annotations

import os
from pathlib import Path

from jaxserve.core.errors import ConfigError


def check_output_file(name: str, path: str | os.PathLike[str], *suffixes: str) -> None:
    """Raises ConfigError, naming the setting `name`, if the file could not be written, or has none
    of these suffixes."""
    file = Path(path).absolute()
    if suffixes and file.suffix not in suffixes:
        raise ConfigError(f"{name} is {str(path)!r}; its name must end in {' or '.join(suffixes)}.")
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigError(f"{name} is {str(path)!r}; give a file in an existing directory.")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{name} is {str(path)!r}, which is not writable by this user.")


def sync_directory(directory: Path) -> None:
    """Syncs the directory entries of new files to disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
