"""Runs llama.cpp's tests of its server, unmodified, against this one.

    python tests/suites/llama_cpp_suite.py CHECKOUT [FILES] [--write-compatibility] [PYTEST OPTIONS]

CHECKOUT has llama.cpp's `tools`: a clone, or `vendor/llama.cpp` of the unpacked source archive of
llama-cpp-python. Every model of the tests is a tiny random one here. Their regular expressions are
for the text of theirs, so that any text matches. Needs `wget` (the package), `filelock` and
`requests` besides `.[test,interfaces]`.
"""

from __future__ import annotations

import re
import sys
from typing import Any, ClassVar

import pytest
from suite import Arguments, Suite, run

SUITE = Suite.read("llama_cpp")
_NOT_HERE = (
    *("server_reranking", "lora_files", "mmproj_url", "models_preset"),
    *("sleep_idle_seconds", "enable_ctx_shift", "spec_type", "cors_origins"),
    *("slot_save_path", "server_tools", "ui_mcp_proxy", "media_path", "gcp_compat"),
)


class Servers:
    """One server for each API key, kept for the tests that follow."""

    names: tuple[str, ...] = ()
    _running: ClassVar[dict[str | None, Any]] = {}

    @classmethod
    def start(cls, theirs: Any, *_: Any, **__: Any) -> None:
        """Stands for the `start` of their ServerProcess."""
        for name in _NOT_HERE:
            if getattr(theirs, name):
                pytest.skip(f"needs a server with {name}")
        key = theirs.api_key
        if key not in cls._running:
            cls.stop_all()  # One at a time: they share the processors.
            flags = [] if key is None else [f"--api-key={key}"]
            cls._running[key] = SUITE.serve(flags, cls.names)
        theirs.server_port = cls._running[key].port

    @classmethod
    def stop_all(cls) -> None:
        while cls._running:
            cls._running.popitem()[1].stop()


class Stand:
    """Pytest's plugin: their server is ours, and their models are not fetched."""

    def pytest_collection_finish(self) -> None:
        import utils  # Theirs.

        utils.ServerProcess.start = lambda theirs, *_, **__: Servers.start(theirs)
        utils.ServerProcess.stop = lambda theirs: None
        utils.ServerPreset.load_all = staticmethod(lambda: None)
        for module in list(sys.modules.values()):
            if getattr(module, "match_regex", None) is utils.match_regex and module is not utils:
                module.match_regex = lambda regex, text: True


def main(given: list[str]) -> int:
    arguments = Arguments.parse(SUITE, given)
    root = arguments.checkout / SUITE.root
    text = "".join((root / file).read_text(encoding="utf-8") for file in arguments.files)
    sent = re.findall(r'model(?:_alias)?"?\s*[=:] ?"([^"]+)"', text)
    Servers.names = ("tinyllama-2", *dict.fromkeys(sent))
    sys.path.insert(0, str(root))
    try:
        return run(SUITE, arguments, ["-m", "not slow"], [Stand()])
    finally:
        Servers.stop_all()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
