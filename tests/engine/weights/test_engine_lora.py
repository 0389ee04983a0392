"""LoRA adapters while the engine runs: whose tokens are whose, and which are loaded."""

from __future__ import annotations

import numpy as np
import pytest
from lora_adapters import LLAMA, merged, write_adapter
from tiny_engines import LONGEST, assert_idle, generate

from jaxserve import LoRARequest
from jaxserve.core.errors import (
    AdapterError,
    ConfigError,
    OverloadedError,
    RequestError,
    SnapshotError,
)
from jaxserve.core.requests.pooling import PoolingParams
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig
from jaxserve.engine.beam_search import BeamSearchParams
from jaxserve.runtime.startup.engine_plan import plan_engine

GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def adapters(llama, tmp_path_factory):
    """Requests for four adapters, and the models that merging each gives, by name."""
    directory, made = tmp_path_factory.mktemp("lora"), {}
    options = [
        {"rank": 8, "alpha": 16},
        {"rank": 2, "use_rslora": True},
        {"targets": LLAMA[:2]},
        {"targets": LLAMA[3:]},
    ]
    for seed, (name, own) in enumerate(zip("abcd", options)):
        path = write_adapter(directory / name, llama, seed=seed, **own)
        model = merged(llama, path, directory / f"merged-{name}")
        made[name] = LoRARequest(name, path), model
    return made


@pytest.fixture(scope="module")
def loaded(llama):
    """An engine that drafts too, which adapters do not change."""
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    with llama.load(debug_kv=True, speculative_config=drafts, **LORA) as llm:
        yield llm


@pytest.fixture
def llm(loaded):
    """The engine without adapters, and idle."""
    for name in loaded.list_loras():
        loaded.remove_lora(name)
    loaded.reset_prefix_cache()
    yield loaded
    assert_idle(loaded.engine)


def requests(adapters, names):
    return [None if name == "-" else adapters[name][0] for name in names]


def models(llama, adapters, names):
    return [llama if name == "-" else adapters[name][1] for name in names]


def test_each_request_of_a_batch_has_its_own_adapter(llm, llama, adapters, compiled):
    names = "a-bca-cb"
    prompts = [llama.prompts[place] for place in (9, 9, 9, 9, 8, 10, 11, 4)]
    asked, owners = requests(adapters, names), models(llama, adapters, names)
    compiled.clear()
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=asked)
    assert compiled == [], "an adapter compiled something"
    for output, owner in zip(outputs, owners):
        owner.check_greedy(output)
    tokens = {tuple(output.outputs[0].token_ids) for output in outputs[:4]}
    assert len(tokens) == 4, "adapters of these tests change what the model says"
    for prompt, lora, output in zip(prompts, asked, outputs):
        (alone,) = llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=lora)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids


def test_prefixes_are_those_of_an_adapter(llm, llama, adapters):
    def cached(name):
        (output,) = llm.generate(
            llama.prompts[7], GREEDY, use_tqdm=False, lora_request=requests(adapters, name)[0]
        )
        models(llama, adapters, name)[0].check_greedy(output)
        return output.metrics.cached_tokens

    assert [cached(name) for name in "-ab"] == [0, 0, 0]
    assert all(cached(name) > 0 for name in "-ab")
    llm.remove_lora("a")
    assert cached("a") > 0, "the same adapter, loaded again, finds its pages"


def test_adapters_in_use_stay_and_others_make_room(llm, llama, adapters, compiled):
    a, b, c, d = requests(adapters, "abcd")
    llm.add_lora(a)
    streams = [llm.stream(llama.prompts[5], GREEDY, lora_request=lora) for lora in (b, c)]
    assert llm.list_loras() == ["a", "b", "c"]
    with pytest.raises(OverloadedError, match=r"all 3 slots .*a, b, c.* max_loras"):
        llm.generate(llama.prompts[5], GREEDY, use_tqdm=False, lora_request=d)
    tokens = [[token for delta in stream for token in delta.token_ids] for stream in streams]
    for stream_tokens, name in zip(tokens, "bc"):
        assert stream_tokens == generate_merged(adapters[name][1], llama.prompts[5])
    compiled.clear()
    (output,) = llm.generate(llama.prompts[5], GREEDY, use_tqdm=False, lora_request=d)
    assert compiled == []
    adapters["d"][1].check_greedy(output)
    assert llm.list_loras() == ["a", "c", "d"], "b was used longest ago, and a was added to stay"
    with pytest.raises(RequestError, match="no adapter is loaded as 'b'"):
        llm.remove_lora("b")
    llama.check_greedy(generate(llm, llama.prompts[5], GREEDY))


def test_an_adapter_takes_the_place_of_another_whose_requests_keep_it(llm, llama, adapters):
    (a, of_a), (b, of_b) = adapters["a"], adapters["b"]
    inplace = LoRARequest("a", b.path)
    llm.add_lora(a)
    stream = llm.stream(llama.prompts[5], GREEDY, lora_request=a)
    with pytest.raises(RequestError, match="load it in place"):
        llm.add_lora(inplace)
    llm.add_lora(inplace, load_inplace=True)
    assert llm.list_loras().count("a") == 1
    (output,) = llm.generate(llama.prompts[5], GREEDY, use_tqdm=False, lora_request=inplace)
    of_b.check_greedy(output)
    tokens = [token for delta in stream for token in delta.token_ids]
    assert tokens == generate_merged(of_a, llama.prompts[5])
    with pytest.raises(AdapterError):
        llm.add_lora(LoRARequest("a", "/nowhere"), load_inplace=True)
    (output,) = llm.generate(llama.prompts[5], GREEDY, use_tqdm=False, lora_request=inplace)
    of_b.check_greedy(output)
    llm.add_lora(a, load_inplace=True)


def test_a_removed_adapter_serves_its_requests_to_their_end(llm, llama, adapters):
    *three, d = requests(adapters, "abcd")
    streams = [llm.stream(llama.prompts[5], GREEDY, lora_request=lora) for lora in three]
    llm.remove_lora("a")
    assert llm.list_loras() == ["b", "c"]
    with pytest.raises(OverloadedError, match="all 3 slots"):
        llm.add_lora(d)
    for name, stream in zip("abc", streams):
        tokens = [token for delta in stream for token in delta.token_ids]
        assert tokens == generate_merged(adapters[name][1], llama.prompts[5])
    llm.add_lora(d)
    assert llm.list_loras() == ["b", "c", "d"], "in the slot of the one that was removed"


def generate_merged(model, prompt):
    tokens = list(prompt)
    while len(tokens) < len(prompt) + LONGEST:
        tokens.append(int(model.logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_requests_move_to_another_engine_with_their_adapter(llm, llama, adapters, tmp_path):
    a, b = requests(adapters, "ab")
    streams = [llm.stream(llama.prompts[9], GREEDY, lora_request=lora) for lora in (a, b, None)]
    next(streams[0])
    llm.snapshot(tmp_path / "snapshot")
    for stream in streams:
        stream.close()
    llm.remove_lora("a")
    llm.remove_lora("b")
    restored = llm.restore(tmp_path / "snapshot")
    tokens = [[token for delta in stream for token in delta.token_ids] for stream in restored]
    for own, name in zip(tokens, "ab-"):
        assert own == generate_merged(models(llama, adapters, name)[0], llama.prompts[9])


def test_restored_requests_need_the_adapters_of_the_unfinished(llm, llama, adapters, tmp_path):
    """Those of finished ones may be gone. Where all slots are taken, it can be tried again."""
    path = write_adapter(tmp_path / "gone", llama)
    gone = LoRARequest("gone", path)
    ended = llm.engine.add("ended", llama.prompts[5], GREEDY, lora_request=gone)
    while not ended.finished:
        llm.engine.step()
    a, *others = requests(adapters, "abcd")
    stream = llm.stream(llama.prompts[9], GREEDY, lora_request=a)
    llm.engine.snapshots.write(tmp_path / "snapshot", ended=[ended])
    stream.close()
    path.rename(tmp_path / "elsewhere")
    for name in llm.list_loras():
        llm.remove_lora(name)
    for other in others:
        llm.add_lora(other)
    with pytest.raises(OverloadedError, match="all 3 slots"):
        llm.restore(tmp_path / "snapshot")
    llm.remove_lora("d")
    restored = {stream.request_id: stream for stream in llm.restore(tmp_path / "snapshot")}
    assert restored.pop("ended").request.lora_request == gone
    ((name, resumed),) = restored.items()
    tokens = resumed.result().outputs[0].token_ids
    assert name == stream.request_id
    assert list(tokens) == generate_merged(adapters["a"][1], llama.prompts[9])


def test_an_adapter_that_was_replaced_is_not_taken_for_the_one_before(llm, llama, tmp_path):
    """Nor is its KV: later requests would find that of the other adapter."""
    lora = LoRARequest("e", write_adapter(tmp_path / "e", llama, seed=11))
    stream = llm.stream(llama.prompts[9], GREEDY, lora_request=lora)
    next(stream)
    llm.snapshot(tmp_path / "snapshot")
    parts = list(llm.export_request(stream.request_id))
    stream.close()
    llm.remove_lora("e")
    (tmp_path / "e").rename(tmp_path / "before")
    write_adapter(tmp_path / "e", llama, seed=12)
    with pytest.raises(SnapshotError, match=r"had another adapter than .*/e' is now"):
        llm.restore(tmp_path / "snapshot")
    with pytest.raises(SnapshotError, match="had another adapter"):
        llm.import_request(parts)


def test_embeddings_beams_and_chats_take_adapters(llm, llama, adapters):
    a, model = adapters["a"]
    prompt = llama.prompts[6]
    plain, own = llm.embed([prompt] * 2, use_tqdm=False, lora_request=[None, a])
    assert plain.outputs.embedding != own.outputs.embedding
    mean = PoolingParams(pooling="mean")
    (other,) = llm.embed(prompt, pooling_params=mean, use_tqdm=False, lora_request=a)
    assert other.outputs.embedding != own.outputs.embedding
    texts = ["a cat", "the sea"]
    vectors = [each.outputs.embedding for each in llm.embed(texts, use_tqdm=False, lora_request=a)]
    (scored,) = llm.score(*texts, use_tqdm=False, lora_request=a)
    assert scored.outputs.score == pytest.approx(np.dot(*vectors), abs=1e-5)
    beams = BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True)
    (found,) = llm.beam_search(prompt, beams, use_tqdm=False, lora_request=a)
    assert list(found.sequences[0].tokens[len(prompt) :]) == generate_merged(model, prompt)[:6]


def test_bad_adapters_change_nothing(llm, llama, adapters, tmp_path):
    a, _ = adapters["a"]
    llm.add_lora(a)
    high = write_adapter(tmp_path / "high", llama, rank=9)
    for bad, error, words in (
        (LoRARequest("high", high), AdapterError, "r 9, and max_lora_rank is 8"),
        (LoRARequest("none", tmp_path / "none"), AdapterError, "no directory"),
        (LoRARequest("a", high), RequestError, "is loaded from"),
        ("a", RequestError, "must be a LoRARequest"),
    ):
        with pytest.raises(error, match=words):
            llm.generate(llama.prompts[3], GREEDY, use_tqdm=False, lora_request=bad)
        with pytest.raises(error, match=words):
            llm.add_lora(bad)
    assert llm.list_loras() == ["a"]
    for path in ("", None):
        with pytest.raises(RequestError, match=r"LoRARequest\(name, path\)"):
            LoRARequest("a", path)


def test_without_enable_lora_adapters_are_refused(llm_for, llama, adapters):
    llm, (a, _) = llm_for(), adapters["a"]
    with pytest.raises(RequestError, match="enable_lora=True"):
        llm.generate(llama.prompts[3], GREEDY, use_tqdm=False, lora_request=a)
    with pytest.raises(ConfigError, match="max_loras is 2, but enable_lora is False"):
        EngineConfig(max_loras=2)
    with pytest.raises(ConfigError, match="sequence_parallel"):
        EngineConfig(enable_lora=True, sequence_parallel=True)


def test_the_plan_counts_adapters(llama):
    settings = {"model": llama.path} | llama.settings()
    without = plan_engine(EngineConfig(**settings)).memory
    small = plan_engine(EngineConfig(**settings, **LORA | {"max_loras": 1})).memory
    large = plan_engine(EngineConfig(**settings, **LORA)).memory
    model = llama.config
    dims = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, ff = model.hidden_size, model.intermediate_size
    pairs = [(hidden, out) for out in (dims[0], dims[1], dims[1], ff, ff)]
    pairs += [(dims[0], hidden), (ff, hidden)]
    one = 4 * 8 * model.num_layers * sum(inputs + outputs for inputs, outputs in pairs)
    assert (without.lora_bytes, small.lora_bytes, large.lora_bytes) == (0, 2 * one, 4 * one)
    assert large.total_bytes - small.total_bytes >= 2 * one


def test_adapters_add_to_packed_products_and_within_tiles(llama, adapters):
    (a, _), prompt = adapters["a"], llama.prompts[8]
    with llama.load(quantization="int8", batch_invariant=True, **LORA) as llm:
        prompts, asked = [prompt, prompt, llama.prompts[5]], [a, None, a]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=asked)
        (alone,) = llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=a)
    own, plain, _ = (output.outputs[0] for output in outputs)
    assert alone.outputs[0].token_ids == own.token_ids != plain.token_ids
    llama.rounded("int8").check_greedy(outputs[1])
