"""Dependencies that only some users need: extras of the package, imported where they are used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jaxserve.core.errors import MissingDependencyError


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Imports of an extra's modules. Raises MissingDependencyError if one is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise MissingDependencyError(
            f"this needs {package}, which is not installed; run: pip install 'jaxserve[{name}]'"
        ) from error
