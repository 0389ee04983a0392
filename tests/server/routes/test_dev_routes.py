"""The routes of a training loop: memory given back and taken, weights from a checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import json
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from patience import PATIENCE_S
from safetensors.numpy import load_file, save_file
from test_service import BODY, PATH

from jaxserve.async_engine import AsyncEngine
from jaxserve.server.app import AppSettings, create_app
from jaxserve.server.run import Stopping, _drain
from jaxserve.server.service import Service

SERVED = BODY | {"prompt": [5, 6, 7], "return_token_ids": True}


@pytest.fixture(scope="module")
def trained(llama, tmp_path_factory):
    """A checkpoint of the tiny Llama after some training."""
    directory = tmp_path_factory.mktemp("trained")
    for file in llama.path.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    (weights,) = directory.glob("*.safetensors")
    noise = np.random.default_rng(8)
    tensors = load_file(weights)
    for name, tensor in tensors.items():
        tensors[name] = tensor + noise.normal(0, 0.1, tensor.shape).astype(tensor.dtype)
    save_file(tensors, weights, metadata={"format": "pt"})
    return directory


def run(llama, scenario):
    async def with_client():
        service = Service(["tiny"], max_queued_requests=8)
        app = create_app(service, AppSettings((), 1 << 20, False, dev_mode=True))
        engine = await asyncio.to_thread(AsyncEngine.load, llama.path, **llama.settings())
        try:
            await service.begin(engine, None)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                await scenario(client, engine, service)
        finally:
            await asyncio.to_thread(engine.close)

    asyncio.run(asyncio.wait_for(with_client(), PATIENCE_S))


def test_requests_wait_while_the_engine_sleeps_and_new_ones_get_503(llama):
    async def scenario(client, engine, service):
        undisturbed = (await client.post(PATH, json=SERVED)).json()
        params = engine.default_sampling_params(max_tokens=40, ignore_eos=True, temperature=0)
        stream = engine.stream([5, 6, 7], params)
        token_ids = [*(await anext(stream)).token_ids]
        for level in (1, 2):
            assert (await client.post(f"/sleep?level={level}")).status_code == 200
            assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
            refused = await client.post(PATH, json=SERVED)
            assert refused.status_code == 503 and "wake_up" in refused.text
            if level == 1:
                await client.post("/wake_up?tags=weights")
                assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
            assert (await client.post("/wake_up")).status_code == 200
        async for delta in stream:
            token_ids += delta.token_ids
        assert token_ids == undisturbed["choices"][0]["token_ids"]
        for path, says in (
            ("/sleep?level=3", "level is 3"),
            ("/sleep?level=deep", "level"),
            ("/wake_up?tags=all", "tags names 'all'"),
        ):
            refused = await client.post(path)
            assert refused.status_code == 400 and says in refused.json()["error"]["message"]

    run(llama, scenario)


def test_weights_from_disk_say_their_version_and_change_the_fingerprint(llama, trained):
    async def scenario(client, engine, service):
        async def completed():
            answer = (await client.post(PATH, json=SERVED)).json()
            return answer["system_fingerprint"], answer["choices"][0]

        async def updated(path):
            return await client.post("/update_weights_from_disk", json={"model_path": str(path)})

        old_fingerprint, old = await completed()
        assert old["weights"] == [{"version": 0, "num_tokens": 40}]
        answer = await updated(trained)
        assert answer.json()["success"] and answer.json()["weights_version"] == 1, answer.text
        fingerprint, new = await completed()
        assert new["weights"] == [{"version": 1, "num_tokens": 40}]
        assert fingerprint != old_fingerprint and new["token_ids"] != old["token_ids"]
        # A failed update leaves these weights serving.
        refused = await updated(trained / "absent")
        assert refused.status_code == 400
        assert "there is no file" in json.dumps(refused.json())
        assert (await completed()) == (fingerprint, new)
        assert (await updated(llama.path)).json()["weights_version"] == 2
        assert (await completed())[1]["token_ids"] == old["token_ids"]

    run(llama, scenario)


@pytest.mark.parametrize(("dev_mode", "status"), [(True, 503), (False, 404)])
def test_the_routes_are_there_in_dev_mode_only(dev_mode, status):
    async def ask():
        app = create_app(Service(["tiny"], 8), AppSettings((), 1 << 20, False, dev_mode=dev_mode))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            adapter = {"lora_name": "a", "lora_path": "a"}
            for answer in (
                await client.post("/sleep"),
                await client.post("/wake_up"),
                await client.post("/update_weights_from_disk", json={"model_path": "x"}),
                await client.post("/v1/load_lora_adapter", json=adapter),
                await client.post("/v1/unload_lora_adapter", json={"lora_name": "a"}),
                await client.get("/is_sleeping"),
            ):
                assert answer.status_code == status
                assert ("--dev-mode" in answer.json()["error"]["message"]) is not dev_mode
            assert "--dev-mode" not in (await client.get("/asleep")).text

    asyncio.run(ask())


def test_a_device_that_fails_in_a_change_ends_the_server(llama, monkeypatch):
    """Requests would be refused for ever by a server that says it is ready."""

    async def scenario(client, engine, service):
        def fail():
            raise RuntimeError("the device is lost")

        monkeypatch.setattr(engine._engine._runner.memory, "free_pages", fail)
        with contextlib.suppress(RuntimeError):  # of httpx, which shows what the server has logged
            assert (await client.post("/sleep")).status_code == 500
        await asyncio.wrap_future(engine.ended)
        assert "sleep failed: RuntimeError: the device is lost" in str(engine.failure)
        assert (await client.get("/health")).json() == {"status": "failed"}

    run(llama, scenario)


def test_requests_that_no_snapshot_can_have_end_with_what_they_have(llama, tmp_path):
    async def scenario(client, engine, service):
        assert await engine.update_weights(llama.path) == 1
        asked = asyncio.create_task(client.post(PATH, json=SERVED | {"max_tokens": 100}))
        while not service.num_sequences:
            await asyncio.sleep(0)
        stop = SimpleNamespace(repeated=asyncio.Event())
        assert await _drain(service, engine, stop, Stopping(0, tmp_path)) == 1
        answer = await asked
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["finish_reason"] == "abort"

    run(llama, scenario)
