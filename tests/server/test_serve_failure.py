"""An engine that dies under its requests: they get errors, and /health says so."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import httpx
from patience import PATIENCE_S

from jaxserve.async_engine import AsyncEngine
from jaxserve.server.app import AppSettings, create_app
from jaxserve.server.http.listening import listen
from jaxserve.server.run import Stopping, serve
from jaxserve.server.service import Service

PATH = "/v1/completions"
ENDLESS = {"prompt": "hi", "max_tokens": 100, "ignore_eos": True}


def test_requests_and_health_tell_of_it(llama, monkeypatch):
    service = Service(["tiny"], max_queued_requests=8)
    app = create_app(service, AppSettings((), 1 << 20, log_requests=False))
    streaming = threading.Event()

    async def watched(scope, receive, send):
        async def noting(message):
            if message.get("more_body"):
                streaming.set()
            await send(message)

        await app(scope, receive, noting)

    def break_once_both_run(engine):
        read = engine._engine._runner.read

        def broken(step):
            if len(engine._thread.listeners) == 2 and streaming.is_set():
                raise RuntimeError("the device fell off the bus")
            time.sleep(0.05)
            return read(step)

        monkeypatch.setattr(engine._engine._runner, "read", broken)

    async def scenario():
        transport = httpx.ASGITransport(watched)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            early = await client.get("/health")
            assert (early.status_code, early.json()) == (503, {"status": "starting"})
            assert (await client.post(PATH, json=ENDLESS)).status_code == 503
            metrics = (await client.get("/metrics")).text
            assert 'jaxserve:open_sequences{model_name="tiny"} 0.0' in metrics
            engine = await asyncio.to_thread(AsyncEngine.load, llama.path, **llama.settings())
            await service.begin(engine, None)
            assert (await client.get("/health")).status_code == 200
            break_once_both_run(engine)
            whole, streamed = await asyncio.gather(
                client.post(PATH, json=ENDLESS), client.post(PATH, json=ENDLESS | {"stream": True})
            )
            assert whole.status_code == 503
            assert "fell off the bus" in whole.json()["error"]["message"]
            *_, error, done = [line for line in streamed.text.split("\n\n") if line]
            assert done == "data: [DONE]"
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "unavailable"
            late = await client.get("/health")
            assert (late.status_code, late.json()) == (503, {"status": "failed"})
            assert (await client.post(PATH, json=ENDLESS)).status_code == 503
            assert service.num_sequences == 0
            await asyncio.to_thread(engine.close)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_the_server_ends_with_its_engine(llama, monkeypatch, caplog):
    """A supervisor can then restart it."""
    settings = AppSettings((), 1 << 20, log_requests=False)

    def broken(step):
        raise RuntimeError("the device fell off the bus")

    def load() -> AsyncEngine:
        engine = AsyncEngine.load(llama.path, **llama.settings())
        monkeypatch.setattr(engine._engine._runner, "read", broken)
        return engine

    async def scenario():
        service = Service(["tiny"], max_queued_requests=8)
        with listen("127.0.0.1", 0) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            serving = asyncio.create_task(
                serve(service, settings, listener, load, Stopping(20, None))
            )
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
                while (await client.get("/health")).status_code != 200:
                    await asyncio.sleep(0.05)
                answer = await client.post(PATH, json=ENDLESS)
                assert answer.status_code == 503
                assert "fell off the bus" in answer.json()["error"]["message"]
            return await serving

    assert asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S)) == 1
    assert "the engine has failed" in caplog.text
