"""LoRA adapters of several replicas, each of which has its own copy."""

from __future__ import annotations

import asyncio

import pytest
from lora_adapters import merged, write_adapter
from patience import PATIENCE_S
from tiny_engines import LONGEST

from jaxserve.cluster.replicas.replica import Replica
from jaxserve.cluster.router import Router
from jaxserve.core.errors import ConfigError, RequestError
from jaxserve.core.requests.lora import LoRARequest
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig
from jaxserve.engine.output_queue import output_of

GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)


def test_every_replica_has_the_adapters(llama, tmp_path):
    lora = LoRARequest("sql", write_adapter(tmp_path / "sql", llama))
    owners = {lora: merged(llama, tmp_path / "sql", tmp_path / "merged"), None: llama}
    settings = llama.settings(enable_lora=True, max_loras=1, max_lora_rank=4)
    replicas = [Replica(), Replica()]
    router = Router(lambda: replicas, EngineConfig.of(model=llama.path, **settings))

    async def answered(name, prompt, adapter):
        submitted = router.submit([prompt], GREEDY, [name], lora_request=adapter)
        async with await submitted as updates:
            owners[adapter].check_greedy(await output_of(updates))

    async def scenario():
        await router.add_lora(lora)
        for replica in replicas:
            assert replica._ready._engine.adapters.names == ["sql"]
        with pytest.raises(ConfigError, match="load_inplace is of one engine"):
            await router.add_lora(lora, load_inplace=True)
        asked = [(prompt, adapter) for prompt in llama.prompts[4:7] for adapter in owners]
        await asyncio.gather(*(answered(str(number), *each) for number, each in enumerate(asked)))
        await router.remove_lora("sql")
        with pytest.raises(RequestError, match="no adapter is loaded as 'sql'"):
            await router.remove_lora("sql")
        await answered("again", llama.prompts[8], lora)

    try:
        asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    finally:
        router.close()
