"""Logging: every module has a standard logger below `jaxserve`."""

from __future__ import annotations

import functools
import logging
import os
import sys
from typing import Literal, TextIO, get_args

LogLevel = Literal["debug", "info", "warning", "error"]
VARIABLE = "JAXSERVE_LOG_LEVEL"
_log = logging.getLogger(__name__)


def level_from_environment() -> LogLevel | None:
    """The level that JAXSERVE_LOG_LEVEL names, if any; warns of a word that is no level."""
    given = os.environ.get(VARIABLE, "").lower()
    if given in get_args(LogLevel):
        return given
    if given:
        _warn(given)
    return None


@functools.cache  # It is read by the package and by the command, and said once.
def _warn(given: str) -> None:
    known = ", ".join(get_args(LogLevel))
    _log.warning("%s is %r; set it to one of %s.", VARIABLE, given, known)


def configure_logging(level: LogLevel) -> None:
    """Log messages of jaxserve at `level` and above to stderr, or to the handlers that the
    application has given the root logger."""
    if not logging.getLogger().handlers:
        logging.basicConfig(
            format="%(asctime)s %(levelname)s %(message)s", handlers=[_StderrHandler()]
        )
    logging.getLogger("jaxserve").setLevel(level.upper())


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what sys.stderr is at the time: progress bars replace it while they are drawn."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        pass
