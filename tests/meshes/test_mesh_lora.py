"""Adapters on meshes: split as the weights beside them are, with heads that must be padded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from exhaustive import combination, exhaustive
from lora_adapters import LLAMA, merged, write_adapter
from mesh_engines import load, on_mesh, write_llama
from tiny_engines import TinyModel

from jaxserve import LoRARequest
from jaxserve.core.requests.sampling_params import SamplingParams

pytestmark = pytest.mark.meshes

UNEVEN = {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 83,
    "num_hidden_layers": 4,
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize(("mesh", "scope"), [("TP2 PP2", "step"), combination("TP2 CP2", "layer")])
def test_adapters_on_meshes(tmp_path, mesh, scope):
    path = write_llama(tmp_path / "model", **UNEVEN)
    on_mesh(mesh, check_adapters, path, tmp_path, scope)


def check_adapters(mesh: str, path: Path, directory: Path, scope: str) -> None:
    model = TinyModel.open(path)
    made = {"": (None, model)}
    for seed, (name, targets) in enumerate({"a": LLAMA, "b": LLAMA[2:5]}.items()):
        adapter = write_adapter(directory / name, model, seed=seed, targets=targets)
        own = merged(model, adapter, directory / f"merged-{name}")
        made[name] = LoRARequest(name, adapter), own
    prompt = model.prompts[9]
    adapters = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 6}
    with load(model, mesh, program_scope=scope, **adapters) as llm:
        answers = set()
        for name in ("a", "", "b", "a"):
            asked, own = made[name]
            outputs = llm.generate(
                [prompt, model.prompts[4]], GREEDY, use_tqdm=False, lora_request=[asked, None]
            )
            own.check_greedy(outputs[0])
            model.check_greedy(outputs[1])
            answers.add(tuple(outputs[0].outputs[0].token_ids))
        assert len(answers) == 3


@exhaustive
def test_batch_invariance_is_exact(tmp_path):
    path = write_llama(tmp_path / "model", **UNEVEN)
    on_mesh("TP2", check_invariance, path, tmp_path)


def check_invariance(mesh: str, path: Path, directory: Path) -> None:
    model = TinyModel.open(path)
    adapter = LoRARequest("a", write_adapter(directory / "a", model, seed=0, targets=LLAMA))
    scored = dataclasses.replace(GREEDY, logprobs=0)
    prompt = model.prompts[9]
    settings = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 6, "batch_invariant": True}
    with load(model, mesh, **settings) as llm:
        prompts, asked = [prompt, prompt, model.prompts[4]], [adapter, None, adapter]
        together = llm.generate(prompts, scored, use_tqdm=False, lora_request=asked)
        (alone,) = llm.generate(prompt, scored, use_tqdm=False, lora_request=adapter)
    own, plain = together[0].outputs[0], together[1].outputs[0]
    assert own.token_ids != plain.token_ids
    assert alone.outputs[0].logprobs == own.logprobs, "bit for bit"
