"""Files to write at the end of a run, checked before it begins."""

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
