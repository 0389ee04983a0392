"""Engines with a KV manager in debug mode, made when asked for, kept a while; leave them idle."""

from __future__ import annotations

import json

import pytest
from kv_engines import Alone, bytes_of, settle
from patience import PATIENCE_S
from tiny_engines import TinyModel, assert_idle

MAX_ENGINES = 6
"""Kept at once: an engine's programs take some 2,000 memory maps, and a process may have 65,530."""


@pytest.fixture(scope="session")
def deep(tmp_path_factory):
    """A tiny Llama of more layers than a window of streamed weights has."""
    return TinyModel.write_llama(tmp_path_factory.mktemp("deep"), num_hidden_layers=5)


@pytest.fixture(scope="session")
def kv_llm_for(llama, tmp_path_factory):
    """LLMs of the tiny Llama by their settings; tiers are given in pages. They log all events, and
    wait for pages of a lower tier however long it takes: on a busy machine a thread that copies
    them may be late."""
    made = {}
    directory = tmp_path_factory.mktemp("kv")

    def get(host=0, disk=0, **settings):
        key = json.dumps([host, disk, settings], sort_keys=True)
        if key not in made:
            if disk:
                settings |= {"disk_kv_dir": directory, "disk_kv_bytes": bytes_of(llama, disk)}
            made[key] = llama.load(
                debug_kv=True,
                host_kv_bytes=bytes_of(llama, host),
                trace_file=directory / f"{len(made)}.json",
                **settings,
            )
            made[key].engine.kv._offload._timeout_us = lambda *_: PATIENCE_S * 1_000_000
        llm = made[key] = made.pop(key)
        if len(made) > MAX_ENGINES:
            close(made.pop(next(iter(made))))
        for request_id in list(llm.engine._requests):  # What a failed test left behind.
            llm.abort(request_id)
        assert_idle(llm.engine)
        settle(llm.engine)
        llm.reset_prefix_cache()
        settle(llm.engine)
        assert llm.engine.kv.pool.num_free == llm.engine.kv.pool.capacity
        return llm

    def close(llm):
        llm.engine.log.records.clear()  # To write the trace takes longer than most tests.
        llm.close()

    yield get
    for llm in made.values():
        close(llm)


@pytest.fixture(scope="session")
def alone(llama):
    """What a request generates in no company, remembering nothing."""
    with llama.load(debug_kv=True, enable_prefix_caching=False) as llm:
        yield Alone(llm)
