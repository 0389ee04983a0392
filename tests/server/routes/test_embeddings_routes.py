"""`/v1/embeddings` and `/v1/score`: what bodies they take, and in what form they answer."""

from __future__ import annotations

import asyncio
import base64

import httpx
import numpy as np
import pytest
from test_service import run

from jaxserve.async_engine import AsyncEngine
from jaxserve.server.app import AppSettings, create_app
from jaxserve.server.service import Service

PATH = "/v1/embeddings"


def numbers(answer) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    return np.array([entry["embedding"] for entry in answer.json()["data"]])


def test_every_form_of_input_and_encoding(llama):
    async def scenario(client, service, engine):
        async def embed(**body):
            return await client.post(PATH, json=body)

        ids = engine.get_tokenizer().encode("a cat")
        other = engine.get_tokenizer().encode("dogs")
        answer = await embed(input="a cat", model="tiny")
        body = answer.json()
        assert (body["object"], body["model"]) == ("list", "tiny")
        assert body["usage"] == {"prompt_tokens": len(ids), "total_tokens": len(ids)}
        assert [entry["object"] for entry in body["data"]] == ["embedding"]
        cat = numbers(answer)[0]
        expected = await engine.embed(ids)
        np.testing.assert_allclose(cat, expected.outputs.embedding, atol=1e-6)
        for form in (["a cat", "dogs"], [ids, other]):
            answer = await embed(input=form)
            assert [entry["index"] for entry in answer.json()["data"]] == [0, 1]
            both = numbers(answer)
            np.testing.assert_allclose(both[0], cat, atol=1e-5)
        np.testing.assert_allclose(numbers(await embed(input=ids))[0], cat, atol=1e-5)
        encoded = (await embed(input="a cat", encoding_format="base64")).json()
        decoded = np.frombuffer(base64.b64decode(encoded["data"][0]["embedding"]), "<f4")
        np.testing.assert_allclose(decoded, cat, atol=1e-5)
        cut = numbers(await embed(input="a cat", dimensions=8))[0]
        np.testing.assert_allclose(cut, cat[:8] / np.linalg.norm(cat[:8]), atol=1e-5)
        raw = numbers(await embed(input="a cat", normalize=False))[0]
        np.testing.assert_allclose(raw / np.linalg.norm(raw), cat, atol=1e-5)
        mean = numbers(await embed(input="a cat", pooling="mean"))[0]
        assert np.abs(mean - cat).max() > 0.01
        long = await embed(input=[[5, *ids]], truncate_prompt_tokens=len(ids))
        np.testing.assert_allclose(numbers(long)[0], cat, atol=1e-5)

        pair = {"text_1": "a cat", "text_2": ["a cat", "dogs"]}
        data = (await client.post("/v1/score", json=pair)).json()["data"]
        expected = [1, both[0] @ both[1]]
        np.testing.assert_allclose([entry["score"] for entry in data], expected, atol=1e-5)

    run(llama, scenario)


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (PATH, {}, "input is missing"),
        (PATH, {"input": ""}, "input is empty"),
        (PATH, {"input": []}, "input must hold 1 to 2048"),
        (PATH, {"input": ["a", [1]]}, "input must be text, token ids"),
        (PATH, {"input": [1000]}, "input cannot be read: prompt token id 1000"),
        (PATH, {"input": "a", "dimensions": 65}, "dimensions is 65"),
        (PATH, {"input": "a", "dimensions": 0}, "dimensions must be"),
        (PATH, {"input": "a", "encoding_format": "int8"}, "encoding_format must be 'float'"),
        (PATH, {"input": "a", "pooling": "max"}, "pooling must be 'last'"),
        (PATH, {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0"),
        (PATH, {"input": "a" * 500}, "context limit"),
        (PATH, {"input": "a", "stream": True}, "stream is not a field"),
        (PATH, {"input": "a", "model": "other"}, "'other' is not served"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1 has 2 texts"),
        ("/v1/score", {"text_1": "a"}, "text_2 is missing"),
    ],
)
def test_what_is_refused(refusals, path, body, says):
    status, message = refusals(path, body)
    assert status in (400, 404) and says in message


@pytest.fixture(scope="module")
def refusals(llama):
    """Status and message for a body, by an application whose engine is asked nothing."""
    engine = AsyncEngine.load(llama.path, **llama.settings())

    def ask(path, body):
        async def asked():
            service = Service(["tiny"], max_queued_requests=8)
            await service.begin(engine, None)
            app = create_app(service, AppSettings((), 1 << 20, False))
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                answer = await client.post(path, json=body)
            return answer.status_code, answer.json()["error"]["message"]

        return asyncio.run(asked())

    yield ask
    engine.close()
