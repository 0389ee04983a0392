"""What every test shares: helper modules on the path, a program cache, the models."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import pytest

# On a busy machine any example may take longer than Hypothesis' 200 ms, and so may drawing it.
hypothesis.settings.register_profile(
    "without deadline", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("without deadline")

# A shell that runs the tests in the background has them ignore Ctrl-C, and so would their children.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parents[1]
for helpers in (
    "tests/helpers",
    "tests/startup",
    "tests/distributed",
    "tests/meshes",
    "tests/models",
    "tests/sampling",
    "tests/simulator",
    "benchmarks",
):
    sys.path.insert(0, str(ROOT / helpers))

import on_demand  # noqa: E402  (found by the path above)
import tiny_engines  # noqa: E402
from unoptimised import XLA_FLAGS, XLA_FLAGS_OF_INTERPRETERS  # noqa: E402

from jaxserve.core.process.cache_dir import cache_directory  # noqa: E402
from jaxserve.models.loading.fetch import default_model_path  # noqa: E402

OF_TINY_MODELS = ("meshes", "browser", "cluster", "attack")


def pytest_configure(config: pytest.Config) -> None:
    """Sets how programs are compiled, and the cache directory of all workers: what one test
    compiles, the next one loads.

    Tests compile tiny models for longer than they run them, and interpreted kernels too, so their
    programs are unoptimised. Those of the real model, documented commands, notebooks and other
    clients are optimised as for users.

    It is the one that JAXSERVE_CACHE names, which runs of the tests can share, or else one for this
    run, with links to the models in the user's own.
    """
    stage = config.option.markexpr
    if stage.startswith(("not ", "interfaces")) or stage in OF_TINY_MODELS:
        os.environ.setdefault("XLA_FLAGS", XLA_FLAGS)
    on_demand.install()
    if stage in ("interpreted", "oldest_jax"):
        os.environ.setdefault("XLA_FLAGS", XLA_FLAGS_OF_INTERPRETERS)
    if "JAXSERVE_CACHE" in os.environ:
        return
    models = cache_directory() / "models"
    models.mkdir(mode=0o700, exist_ok=True)
    scratch = tempfile.TemporaryDirectory(prefix="jaxserve-tests-")
    Path(scratch.name, "models").symlink_to(models)
    os.environ["JAXSERVE_CACHE"] = scratch.name

    def clean_up() -> None:
        del os.environ["JAXSERVE_CACHE"]
        scratch.cleanup()

    config.add_cleanup(clean_up)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and tests live until the end: the garbage collector would look at all of them again
    and again while programs are traced."""
    gc.freeze()


@pytest.fixture(scope="session")
def session_cache() -> Path:
    """The cache directory of the tests."""
    return cache_directory()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The embedded model's file, fetched if need be."""
    return default_model_path()


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> tiny_engines.TinyModel:
    """A tiny Llama whose tokens are bytes."""
    return tiny_engines.TinyModel.write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def llm_for(llama):
    """LLMs of the tiny Llama by scheduler, made when first asked for and kept: leave them idle."""
    made = {}

    def get(scheduler: str = "sarathi"):
        if scheduler not in made:
            made[scheduler] = llama.load(scheduler=scheduler)
        return made[scheduler]

    yield get
    for llm in made.values():
        llm.close()


@pytest.fixture
def llm(llm_for):
    """The LLM with the default scheduler; the test must leave it idle."""
    llm = llm_for()
    yield llm
    tiny_engines.assert_idle(llm.engine)


@pytest.fixture
def ahead_of_time() -> Iterator[None]:
    """Programs are compiled before an engine is ready, as for users, and not on demand."""
    with on_demand.suspended():
        yield


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Whatever JAX traces, lowers or compiles, by event, as it happens, but for an engine's
    programs."""
    events = []

    def listen(event: str, duration_s: float, **_) -> None:
        if event.startswith("/jax/core/compile") and not on_demand.is_compiling():
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)
