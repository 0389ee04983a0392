"""Runs vLLM's tests of its server and its LLM, unmodified, against this one.

    python tests/suites/vllm_suite.py CHECKOUT [FILES] [--write-compatibility] [PYTEST OPTIONS]

CHECKOUT has vLLM's `tests`: a clone, or the unpacked source archive of the package index. vLLM
itself is not needed. The models of the tests are SmolLM2-135M-Instruct or a tiny random one here,
under their names; flags of their servers become ours, and a server without one of these flags is
not started.
Needs `pytest-asyncio` and `pybase64` besides `.[test,interfaces,peers]`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import re
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar
from unittest import mock

import pytest
import transformers
from suite import Arguments, Suite, run, tiny_model

from jaxserve import LLM, SamplingParams
from jaxserve.core.errors import RequestError
from jaxserve.core.version import __version__
from jaxserve.models.loading.checkpoint import open_checkpoint

SUITE = Suite.read("vllm")
_from_pretrained = transformers.AutoTokenizer.from_pretrained
# Flags by their numbers of values. These set sizes, or turn on what a test then asks for.
_WITHOUT_EFFECT = {
    "--dtype": 1,
    "--enable-auto-tool-choice": 0,
    "--enable-chunked-prefill": 0,
    "--enable-lora": 0,
    "--enable-per-request-metrics": 0,
    "--enable-prompt-tokens-details": 0,
    "--enable-request-id-headers": 0,
    "--enable-server-load-tracking": 0,
    "--enable-tokenizer-info-endpoint": 0,
    "--enforce-eager": 0,
    "--gpu-memory-utilization": 1,
    "--lora-modules": 1,
    "--max-cpu-loras": 1,
    "--max-logprobs": 1,
    "--max-lora-rank": 1,
    "--max-model-len": 1,
    "--max-num-batched-tokens": 1,
    "--max-num-seqs": 1,
    "--max_model_len": 1,
    "--port": 1,
    "--runner": 1,
    "--served-model-name": 1,
    "--show-hidden-metrics-for-version": 1,
    "--structured-outputs-config.backend": 1,
    "--tool-call-parser": 1,
    "--trust-remote-code": 0,
}
_OURS = {
    "--api-key": 1,
    "--reasoning-parser": 1,
    "--root-path": 1,
    "--no-enable-prefix-caching": 0,
}

_ABSENT_TESTS = (
    *("tests.utils", "tests.conftest"),
    "tests.entrypoints.openai.chat_completion.test_serving_chat",
)
"""Modules of the tests that others import: fixtures, and mocks of vLLM's classes."""


class Absent:
    """A name of vLLM's own that a test imports: whatever uses it is skipped."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._skip()

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        self._skip()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __add__(self, other: Any) -> Any:
        self._skip()

    def _skip(self) -> None:
        pytest.skip(f"uses {self._name}, a part of vLLM", allow_module_level=True)


class AbsentModule(types.ModuleType):
    """A module of vLLM's, with what `PROVIDED` has of it."""

    def __getattr__(self, name: str) -> Any:
        full = f"{self.__name__}.{name}"
        if full not in PROVIDED and name.startswith("__"):
            raise AttributeError(name)
        if any(other.startswith(f"{full}.") for other in PROVIDED):
            return importlib.import_module(full)
        return PROVIDED[full] if full in PROVIDED else Absent(full)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `vllm` before that of the checkout."""

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name.split(".")[0] == "vllm":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class RemoteOpenAIServer:
    """Stands for the fixture of vLLM's tests: `jaxserve serve`, one process for equal flags."""

    DUMMY_API_KEY = "none"
    names: tuple[str, ...] = ()
    _running: ClassVar[dict[object, Any]] = {}

    def __init__(
        self,
        model: str,
        args: list[str],
        env_dict: Mapping[str, str] = MappingProxyType({}),
        **_: Any,
    ) -> None:
        if "VL" in model:
            pytest.skip("a model of images")
        keys = [env_dict["VLLM_API_KEY"]] if "VLLM_API_KEY" in env_dict else []
        flags = (*_flags(args), *(flag for key in keys for flag in ("--api-key", key)))
        kind = SUITE.model(), flags
        if kind not in self._running or SUITE.counts_requests():
            self.stop_all()  # One at a time: they share the processors.
            self._running[kind] = SUITE.serve(flags, [*self.names, model])
        self._server = self._running[kind]
        self.proc, self.host, self.port = self._server.process, "127.0.0.1", self._server.port
        self.url_root = f"http://127.0.0.1:{self.port}"
        self.show_hidden_metrics = False

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @classmethod
    def stop_all(cls) -> None:
        while cls._running:
            cls._running.popitem()[1].stop()

    def url_for(self, *parts: str) -> str:
        return f"{self.url_root}/{'/'.join(parts)}"

    def get_client(self, **kwargs: Any) -> Any:
        return self._client("openai", "OpenAI", "/v1", kwargs)

    def get_async_client(self, **kwargs: Any) -> Any:
        return self._client("openai", "AsyncOpenAI", "/v1", kwargs)

    def get_async_client_anthropic(self, **kwargs: Any) -> Any:
        return self._client("anthropic", "AsyncAnthropic", "", kwargs)

    def _client(self, module: str, name: str, path: str, kwargs: dict[str, Any]) -> Any:
        settings = {"api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 600} | kwargs
        client = getattr(__import__(module), name)
        return client(base_url=self.url_root + path, **settings)


def _flags(args: list[str]) -> list[str]:
    """Our flags for those of a test's server."""
    ours = []
    rest = [part for arg in args for part in arg.split("=", 1 if arg.startswith("--") else 0)]
    while rest:
        flag = rest.pop(0)
        if flag in _OURS:
            ours += [flag, *(rest.pop(0) for _ in range(_OURS[flag]))]
        elif flag in _WITHOUT_EFFECT:
            del rest[: _WITHOUT_EFFECT[flag]]
        else:
            pytest.skip(f"{flag} is not a flag here", allow_module_level=True)
    return ours


def _tokenizer(*_: Any, **__: Any) -> Any:
    """The served model's, by transformers."""
    path, _ = SUITE.model()
    if path.is_dir():
        return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    directory = Path(tempfile.mkdtemp())
    open_checkpoint(path).tokenizer().save(directory)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    return _from_pretrained(directory)


class _Vocabulary:
    """For `vllm.config.ModelConfig`, which tests ask for a vocabulary's size."""

    def __init__(self, **_: Any) -> None:
        pass

    def get_vocab_size(self) -> int:
        return open_checkpoint(SUITE.model()[0]).config.vocab_size


def _names_in(text: str) -> list[str]:
    """The models that a test file names, adapters and other names of its server included."""
    models = re.findall(r'"(\w[\w.-]*/[\w.-]+|\w[\w.-]*-lora)"', text)
    return [*models, *re.findall(r'"--served-model-name",\s*"([\w./-]+)"', text)]


PROVIDED: dict[str, Any] = {
    "tests.utils.RemoteOpenAIServer": RemoteOpenAIServer,
    "tests.utils.ROCM_EXTRA_ARGS": [],
    "vllm.SamplingParams": SamplingParams,
    "vllm.sampling_params.SamplingParams": SamplingParams,
    "vllm.tokenizers.get_tokenizer": _tokenizer,
    "vllm.config.ModelConfig": _Vocabulary,
    "vllm.exceptions.VLLMValidationError": RequestError,
    "vllm.envs.VLLM_USE_RUST_FRONTEND": False,
    "vllm.transformers_utils.repo_utils.hf_api": mock.MagicMock,
    "vllm.version.__version__": __version__,
    "vllm.version._prev_minor_version": lambda: __version__,
}


class Stand:
    """Pytest's plugin: stands for fixtures of vLLM's."""

    _llms: ClassVar[dict[int, LLM]] = {}

    @pytest.fixture(scope="session")
    def local_asset_server(self) -> None:
        return None

    @pytest.fixture(scope="session")
    def vllm_runner(self) -> Callable[..., AbstractContextManager[Any]]:
        """`LLM`, of whose settings only the context limit is asked for."""

        @contextlib.contextmanager
        def runner(model: str, max_model_len: int = 1024, **_: Any) -> Iterator[Any]:
            if max_model_len not in self._llms:
                self.close()
                self._llms[max_model_len] = LLM(
                    tiny_model(), max_model_len=max_model_len, max_num_seqs=4
                )
            yield types.SimpleNamespace(llm=self._llms[max_model_len])

        return runner

    @classmethod
    def close(cls) -> None:
        while cls._llms:
            cls._llms.popitem()[1].close()


def main(given: list[str]) -> int:
    arguments = Arguments.parse(SUITE, given)
    sys.meta_path.insert(0, Finder())
    for name in _ABSENT_TESTS:  # Pytest's own finder comes first.
        sys.modules[name] = AbsentModule(name)
    transformers.AutoTokenizer.from_pretrained = _tokenizer
    RemoteOpenAIServer.names = tuple(
        name
        for file in arguments.files
        for name in _names_in((arguments.checkout / SUITE.root / file).read_text(encoding="utf-8"))
    )
    options = ["-p", "pytest_asyncio", f"--confcutdir={SUITE.root}"]
    try:
        return run(SUITE, arguments, options, [Stand()])
    finally:
        RemoteOpenAIServer.stop_all()
        Stand.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
