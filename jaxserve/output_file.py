"""Files that are written: checked before a run begins, and on the disk when they have to be."""

from __future__ import annotations

import os
from pathlib import Path

from jaxserve.errors import ConfigError


def check_output_file(name: str, path: str | os.PathLike[str]) -> None:
    """Raises ConfigError, which calls the setting `name`, when a file could not be written."""
    file = Path(path).absolute()
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigError(f"{name} is {str(path)!r}; give a file in an existing directory.")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{name} is {str(path)!r}, which this user may not write.")


def sync_directory(directory: Path) -> None:
    """Have the names of new files on the disk, as well as what is in them."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
