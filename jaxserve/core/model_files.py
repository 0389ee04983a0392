"""Reads model files, which are untrusted: only regular files of a bounded size.

Links are followed, since the Hugging Face cache uses them; their target is checked.
"""

from __future__ import annotations

import json
import reprlib
import stat
from pathlib import Path
from typing import Any

from jaxserve.core.errors import ModelError

MAX_TEXT_BYTES = 16 << 20
"""Of a config, an index or a chat template."""

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 120
_repr.maxlong = 40
_repr.maxlist = _repr.maxdict = _repr.maxtuple = 8


def shown(value: Any) -> str:
    """`repr(value)` for an error message, however long or deep the value is."""
    return _repr.repr(value)


def check_regular(path: Path, max_bytes: int | None = None) -> None:
    """Raises FileNotFoundError when there is no such file; ModelError when it is not a regular file
    (opening a FIFO would block), has more than `max_bytes`, or cannot be looked up."""
    try:
        found = path.stat()
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise ModelError(f"{path} cannot be read: it is {kind}, not a regular file.")
    if max_bytes is not None and found.st_size > max_bytes:
        raise ModelError(
            f"{path} has {found.st_size:,} bytes, and at most {max_bytes:,} are read; it is not "
            "the file that its name says. Fetch it again."
        )


def read_text(path: Path) -> str:
    """A UTF-8 file. Raises ModelError when it cannot be read, is too large or not UTF-8."""
    try:
        check_regular(path, MAX_TEXT_BYTES)
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelError(f"there is no {path.name} in {path.parent}.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 text: {error}.") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError as `read_text` does, and for anything else."""
    text = read_text(path)
    try:
        content = json.loads(text)
    except RecursionError:
        raise ModelError(f"{path} is not valid JSON: it is nested too deeply.") from None
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, not a JSON object.")
    return content
