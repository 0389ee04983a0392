"""Adapters as models of a server: named in requests, listed, loaded and unloaded."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from lora_adapters import merged, write_adapter
from patience import PATIENCE_S

from jaxserve.async_engine import AsyncEngine
from jaxserve.cli.serve import Serve
from jaxserve.core.errors import AdapterError, ConfigError
from jaxserve.core.requests.lora import LoRARequest
from jaxserve.core.settings.config import EngineConfig
from jaxserve.server.app import AppSettings, create_app
from jaxserve.server.service import Service

PROMPT = [5, 6, 7]
BODY = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
TOKENS = BODY | {"return_token_ids": True}


@pytest.fixture(scope="module")
def adapters(llama, tmp_path_factory):
    """Two adapters, and the models that merging each gives."""
    directory = tmp_path_factory.mktemp("lora")
    paths = [write_adapter(directory / name, llama, seed=ord(name)) for name in "sq"]
    return [(path, merged(llama, path, directory / f"merged-{path.name}")) for path in paths]


def run(llama, adapters, scenario, snapshot=None):
    async def with_client():
        modules = [LoRARequest("first", adapters[0][0])]
        service = Service(["tiny"], max_queued_requests=8, lora_modules=modules)
        app = create_app(service, AppSettings((), 1 << 20, False, dev_mode=True))
        settings = llama.settings(enable_lora=True, max_loras=2, max_lora_rank=4)
        engine = await asyncio.to_thread(AsyncEngine.load, llama.path, **settings)
        try:
            await service.begin(engine, snapshot)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                await scenario(client, service, engine)
        finally:
            await asyncio.to_thread(engine.close)

    asyncio.run(asyncio.wait_for(with_client(), PATIENCE_S))


def test_adapters_are_models_that_come_and_go(llama, adapters):
    async def scenario(client, service, engine):
        async def completed(model):
            answer = await client.post("/v1/completions", json=TOKENS | {"model": model})
            assert answer.status_code == 200, answer.text
            body = answer.json()
            assert body["model"] == model
            return body["system_fingerprint"], body["choices"][0]["token_ids"]

        async def models():
            cards = (await client.get("/v1/models")).json()["data"]
            return {card["id"]: (card["root"], card["parent"]) for card in cards}

        async def change(route, **body):
            answer = await client.post(f"/v1/{route}_lora_adapter", json=body)
            return answer.status_code, answer.text

        (first, of_first), (second, of_second) = adapters
        base, listed = ("tiny", None), (str(first), "tiny")
        assert await models() == {"tiny": base, "first": listed}
        status, text = await change("load", lora_name="second", lora_path=str(second))
        assert status == 200 and "added" in text
        names = ("tiny", "first", "second")
        answers = await asyncio.gather(*map(completed, names))
        assert len({fingerprint for fingerprint, _ in answers}) == 3
        for (_, tokens), model in zip(answers, (llama, of_first, of_second)):
            assert tokens == greedy(model)
        card = (await client.get("/v1/models/second")).json()
        assert (card["root"], card["parent"]) == (str(second), "tiny")
        for name, says in (("second", "served already"), ("tiny", "served already")):
            status, text = await change("load", lora_name=name, lora_path=str(first))
            assert status == 400 and says in text
        status, text = await change("load", lora_name="third", lora_path=str(first))
        assert status == 429 and "max_loras" in text
        inplace = {"lora_name": "second", "load_inplace": True}
        status, text = await change("load", lora_path="/nowhere", **inplace)
        assert status == 400 and await completed("second") == answers[2]
        status, text = await change("load", lora_path=str(first), **inplace)
        assert status == 200 and (await completed("second"))[1] == greedy(of_first)
        assert (await models())["second"] == listed
        status, text = await change(
            "load", lora_path=str(second), **inplace | {"lora_name": "tiny"}
        )
        assert status == 400 and "served already" in text
        status, text = await change("unload", lora_name="second")
        assert status == 200 and "removed" in text
        assert "second" not in await models()
        answer = await client.post("/v1/completions", json=BODY | {"model": "second"})
        assert answer.status_code == 404 and "'first'" in answer.text
        status, text = await change("unload", lora_name="second")
        assert status == 400 and "no adapter is loaded" in text
        status, text = await change("load", lora_name="second", lora_path="/nowhere")
        assert status == 400 and "no directory" in text
        body = {"model": "first", "input": PROMPT}
        vectors = [
            (await client.post("/v1/embeddings", json=body | {"model": name})).json()["data"]
            for name in ("first", "tiny")
        ]
        assert vectors[0] != vectors[1]

    run(llama, adapters, scenario)


def greedy(model):
    tokens = list(PROMPT)
    for _ in range(BODY["max_tokens"]):
        tokens.append(int(model.logits(tokens)[-1].argmax()))
    return tokens[len(PROMPT) :]


def test_a_request_that_was_saved_is_resumed_under_the_name_of_its_adapter(
    llama, adapters, tmp_path
):
    """Of an adapter that was loaded while the server before ran."""
    (_, _), (second, _) = adapters
    body = BODY | {"model": "second", "max_tokens": 40}

    async def saved(client, service, engine):
        params = engine.default_sampling_params(max_tokens=40, ignore_eos=True, temperature=0)
        adapter = LoRARequest("second", second)
        submitted = engine.submit([PROMPT], params, ["mine"], lora_request=adapter)
        async with await submitted as updates:
            await updates.__aiter__().__anext__()
            await engine.snapshot(tmp_path)

    async def scenario(client, service, engine):
        assert service.holds_unclaimed
        names = [card["id"] for card in (await client.get("/v1/models")).json()["data"]]
        assert names == ["tiny", "first", "second"]
        answer = await client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        assert answer.status_code == 200, answer.text
        assert not service.holds_unclaimed

    run(llama, adapters, saved)
    run(llama, adapters, scenario, tmp_path)


def test_a_server_does_not_start_with_an_adapter_that_does_not_fit(llama, tmp_path):
    high = write_adapter(tmp_path / "high", llama, rank=5)
    with pytest.raises(AdapterError, match="max_lora_rank of 5"):
        run(llama, [(high, llama)], None)


@pytest.mark.parametrize(
    ("modules", "enabled", "words"),
    [
        (("a=/models/a",), False, "--enable-lora"),
        (("/models/a",), True, "'/models/a'; each is name=path"),
        (("=x",), True, "each is name=path"),
        (("a=x", "a=y"), True, "'a=y', but a model 'a' is served already"),
        (("smollm2-135m-instruct=x",), True, "is served already"),
        (tuple(f"{name}=x" for name in "abcde"), True, "5 adapters, and max_loras is 4"),
    ],
)
def test_lora_modules_are_names_and_paths(modules, enabled, words):
    serve = Serve(engine=EngineConfig(enable_lora=enabled), lora_modules=modules)
    with pytest.raises(ConfigError, match=words):
        serve._adapters()
