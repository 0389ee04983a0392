"""Model files made up by hypothesis, ten thousand in all: opening any of them ends soon, and with
what it holds or in a typed error."""

from __future__ import annotations

import copy
import json
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tiny_checkpoints import CONFIG, random_tensors, write_gguf, write_hf

from jaxserve.core.errors import JaxserveError, WeightsError
from jaxserve.models.loading.adapter import read_adapter
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.directory import config_from_files
from jaxserve.models.loading.drafters.eagle import EagleCheckpoint
from jaxserve.models.loading.drafters.eagle3 import Eagle3Checkpoint
from jaxserve.models.loading.drafters.medusa import MedusaCheckpoint
from jaxserve.models.loading.gguf.config import ARCHITECTURES as GGUF_ARCHITECTURES
from jaxserve.models.loading.gguf.header import read_gguf
from jaxserve.models.quantization_config import METHODS, parse
from jaxserve.models.registry import ARCHITECTURES, param_specs
from jaxserve.text.chat import render_chat
from jaxserve.text.tokenizer import Tokenizer

pytestmark = pytest.mark.attack

BOUND_S = 20.0
"""For any one file; most take milliseconds."""
INDEX = "model.safetensors.index.json"

opened = 0
"""Files so far."""


def fuzzed(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """So many examples of a test."""
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


# Numbers that JSON can write, and Python reads as they are.
NUMBERS = st.sampled_from([0, -1, 1, 2, 3, 1.5, 10**6, 10**12, 10**18, -(10**18), 10**400]) | (
    st.sampled_from([float("inf"), float("-inf"), float("nan"), 1e308, 5e-324])
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
DEEP = "[" * 100_000


@contextmanager
def soon_or_refused() -> Iterator[None]:
    """Passes for a block that works or raises an error of ours, within the bound."""
    global opened
    opened += 1
    begin = time.monotonic()
    try:
        yield
    except JaxserveError as error:
        assert len(str(error)) < 4000
    assert time.monotonic() - begin < BOUND_S


@pytest.fixture(scope="module")
def tensors() -> dict[str, Any]:
    return random_tensors(CONFIG)


@pytest.fixture
def directory(tmp_path, tensors) -> Path:
    return write_hf(tmp_path / "model", CONFIG, tensors, shards=2)


@fuzzed(1200)
@given(
    architecture=st.sampled_from(sorted(ARCHITECTURES)),
    changes=st.dictionaries(
        st.sampled_from(
            (
                *CONFIG,
                "_name_or_path",
                "attention_bias",
                "bos_token_id",
                "hidden_act",
                "layer_types",
                "max_window_layers",
                "mlp_bias",
                "no_rope_layer_interval",
                "no_rope_layers",
                "pad_token_id",
                "partial_rotary_factor",
                "quantization_config",
                "rope_parameters",
                "rope_scaling",
                "sliding_window",
                "use_sliding_window",
            )
        ),
        VALUES,
        min_size=1,
        max_size=3,
    ),
)
def test_any_config(architecture, changes):
    with soon_or_refused():
        raw = CONFIG | {"architectures": [architecture]} | changes
        param_specs(config_from_files({"config.json": raw}))


QUANTIZATION_FIELDS = st.sampled_from(
    (
        *("activation_scheme", "weight_block_size", "modules_to_not_convert", "kv_cache_scheme"),
        *("bits", "group_size", "zero_point", "version", "desc_act", "sym", "checkpoint_format"),
        *("dynamic", "lm_head", "format", "quantization_status", "config_groups", "ignore"),
        *("sparsity_config", "transform_config", "targets", "weights", "input_activations"),
        *("num_bits", "type", "strategy", "symmetric", "block_structure", "actorder"),
    )
)
QUANTIZATION_VALUES = VALUES | st.sampled_from(
    (
        *(4, 8, "gptq", "gemm", "pack-quantized", "int-quantized", "float-quantized", "compressed"),
        *("group", "channel", "block", "int", "float", ["Linear"], ["re:.*a(b|c)*"], [128, 128]),
    )
)
QUANTIZED = st.dictionaries(
    QUANTIZATION_FIELDS,
    QUANTIZATION_VALUES
    | st.dictionaries(
        QUANTIZATION_FIELDS,
        QUANTIZATION_VALUES | st.dictionaries(QUANTIZATION_FIELDS, QUANTIZATION_VALUES, max_size=6),
        max_size=4,
    ),
    max_size=8,
)


@fuzzed(300)
@given(method=st.sampled_from(METHODS), fields=QUANTIZED)
def test_any_quantization_config(method, fields):
    with soon_or_refused():
        raw = CONFIG | {"quantization_config": fields | {"quant_method": method}}
        config_from_files({"config.json": raw})
        stored = parse(raw)
        for module in ("model.layers.0.self_attn.q_proj", "model.layers.31.mlp.down_proj"):
            if scheme := stored.scheme(module):
                scheme.format(4096)


ROPE_KINDS = ["linear", "dynamic", "llama3", "yarn", "longrope", "default", "spiral"]


@fuzzed(600)
@given(
    kind=st.sampled_from(ROPE_KINDS),
    fields=st.dictionaries(
        st.sampled_from(
            (
                "factor",
                "original_max_position_embeddings",
                "low_freq_factor",
                "beta_fast",
                "high_freq_factor",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "truncate",
                "attention_factor",
                "rope_theta",
                "short_factor",
                "long_factor",
            )
        ),
        NUMBERS | st.floats() | VALUES | st.just([1e-308] * 8),
    ),
)
def test_any_rope_scaling(kind, fields):
    with soon_or_refused():
        raw = CONFIG | {"rope_scaling": {"rope_type": kind} | fields}
        config_from_files({"config.json": raw})


@fuzzed(500)
@given(
    generation=st.dictionaries(
        st.sampled_from(
            (
                "temperature",
                "top_k",
                "top_p",
                "min_p",
                "repetition_penalty",
                "max_new_tokens",
                "do_sample",
                "eos_token_id",
            )
        ),
        VALUES,
    )
)
def test_any_generation_config(generation):
    with soon_or_refused():
        config_from_files({"config.json": CONFIG, "generation_config.json": generation})


@fuzzed(900)
@given(content=VALUES | st.fixed_dictionaries({"weight_map": VALUES}))
def test_any_index(directory, content):
    (directory / INDEX).write_text(json.dumps(content))
    with soon_or_refused():
        open_checkpoint(directory)


HEADER_VALUES = VALUES | st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F8_E4M3", "X"]) | VALUES,
        "shape": st.lists(NUMBERS, max_size=5) | VALUES,
        "data_offsets": st.lists(NUMBERS, max_size=3) | VALUES,
    }
)


@fuzzed(2000)
@given(
    changes=st.dictionaries(st.sampled_from(["model.norm.weight", "new"]), HEADER_VALUES),
    tail=st.binary(max_size=64),
)
@example(changes={"new": {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 0]}}, tail=b"")
def test_any_safetensors_header(tmp_path, tensors, changes, tail):
    path = tmp_path / "model.safetensors"
    if not path.exists():
        write_hf(tmp_path, CONFIG, tensors)
        (tmp_path / "original").write_bytes(path.read_bytes())
    content = (tmp_path / "original").read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length]) | changes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :] + tail)
    with soon_or_refused():
        open_checkpoint(tmp_path)


@fuzzed(900)
@given(prefix=st.binary(max_size=200))
@example(prefix=struct.pack("<Q", 1 << 63))
@example(prefix=struct.pack("<Q", len(DEEP)) + DEEP.encode())
def test_any_bytes_as_safetensors(tmp_path, prefix):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(prefix)
    with soon_or_refused(), pytest.raises(WeightsError):
        open_checkpoint(tmp_path)


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory, tensors) -> bytes:
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", CONFIG, tensors)
    return path.read_bytes()


@fuzzed(2000)
@given(data=st.data())
def test_any_change_in_a_gguf_header(tmp_path, gguf_bytes, data):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes)
    header = len(read_gguf(path).header)
    content = bytearray(gguf_bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header - 1))
        new = data.draw(st.binary(min_size=1, max_size=8) | st.just(b"\xff" * 8))
        content[at : at + len(new)] = new
    path.write_bytes(content)
    with soon_or_refused():
        open_checkpoint(path).tokenizer()


GGUF_VALUES = st.recursive(
    st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=4,
)


@fuzzed(700)
@given(data=st.data())
def test_any_gguf_metadata(tmp_path, gguf_bytes, data, monkeypatch):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes)
    file = read_gguf(path)
    keys = [*file.metadata, "tokenizer.chat_template", "tokenizer.chat_templates"]
    keys += [f"tokenizer.ggml.{name}" for name in ("bos_token_id", "eot_token_id", "pre", "scores")]
    keys += [f"llama.{name}" for name in ("rope.scaling.type", "rope.scaling.factor")]
    keys += ["llama.rope.dimension_count", "llama.attention.sliding_window", "general.name"]
    keys += ["general.sampling.temp", "llama.expert_count", "llama.attention.key_length"]
    changes = data.draw(
        st.dictionaries(
            st.sampled_from(keys),
            GGUF_VALUES | st.sampled_from(sorted(GGUF_ARCHITECTURES)),
            min_size=1,
            max_size=3,
        )
    )
    metadata = copy.deepcopy(file.metadata)
    metadata |= changes
    with monkeypatch.context() as patch:
        patch.setattr(
            "jaxserve.models.loading.gguf.checkpoint.read_gguf",
            lambda path: file.__class__(path, metadata, file.tensors, file.header),
        )
        with soon_or_refused():
            open_checkpoint(path).tokenizer()


@fuzzed(500)
@given(
    name=st.sampled_from(
        ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"]
    ),
    content=st.dictionaries(
        st.sampled_from(["chat_template", "bos_token", "eos_token", "unk_token", "eos_token_id"]),
        VALUES
        | st.fixed_dictionaries({"content": VALUES})
        | st.lists(st.fixed_dictionaries({"name": VALUES, "template": VALUES}), max_size=2),
    ),
)
def test_any_tokenizer_config(directory, name, content):
    for other in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        (directory / other).unlink(missing_ok=True)
    (directory / name).write_text(json.dumps(content))
    with soon_or_refused():
        Tokenizer.from_directory(directory)


@fuzzed(300)
@given(
    part=st.sampled_from(["model", "pre_tokenizer", "decoder", "normalizer", "added_tokens"]),
    content=VALUES,
)
def test_any_tokenizer_json(directory, part, content):
    whole = json.loads((directory / "tokenizer.json").read_text())
    (directory / "tokenizer.json").write_text(json.dumps(whole | {part: content}))
    try:
        with soon_or_refused():
            Tokenizer.from_directory(directory)
    finally:
        (directory / "tokenizer.json").write_text(json.dumps(whole))


ADAPTER = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
ADAPTER_FIELDS = (*ADAPTER, "bias", "use_rslora", "use_dora", "init_lora_weights", "rank_pattern")
LINEAR = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def specs(tmp_path_factory, tensors):
    model = write_hf(tmp_path_factory.mktemp("base") / "model", CONFIG, tensors)
    return param_specs(open_checkpoint(model).config)


@fuzzed(300)
@given(changes=st.dictionaries(st.sampled_from(ADAPTER_FIELDS), VALUES, min_size=1, max_size=3))
@example(changes={"lora_alpha": 10**400})
def test_any_adapter_config(tmp_path, tensors, specs, changes):
    outputs, inputs = tensors[f"{LINEAR}.weight"].shape
    halves = {"A": (4, inputs), "B": (outputs, 4)}
    made = {
        f"base_model.model.{LINEAR}.lora_{h}.weight": np.ones(s, "f") for h, s in halves.items()
    }
    save_file(made, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER | changes))
    with soon_or_refused():
        read_adapter(tmp_path, specs, 8, np.dtype("float32"))


DRAFTERS = {
    MedusaCheckpoint: {
        **{"model_type": "medusa", "original_lm_head": True, "num_heads": 2},
        **{"num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 256, "medusa_fc_bias": False},
    },
    EagleCheckpoint: CONFIG | {"num_hidden_layers": 1},
    Eagle3Checkpoint: CONFIG
    | {"num_hidden_layers": 1, "draft_vocab_size": 32, "target_hidden_size": 64}
    | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {},
        "norm_before_residual": True,
    },
}


@fuzzed(300)
@given(kind=st.sampled_from(list(DRAFTERS)), data=st.data())
def test_any_config_of_a_drafter(directory, kind, data):
    config = DRAFTERS[kind]
    names = st.sampled_from(sorted(config))
    changes = data.draw(st.dictionaries(names, VALUES | st.just(1 << 20), min_size=1, max_size=3))
    (directory / "config.json").write_text(json.dumps(config | changes))
    with soon_or_refused():
        kind.open(directory)


PIECES = st.sampled_from(
    [
        *("{% for m in messages %}", "{% endfor %}", "{% if tools %}", "{% else %}", "{% endif %}"),
        *("{{ m.role }}", "{{ m.content | trim }}", "{% set x = messages %}", "{{ x | tojson }}"),
        *("{% macro f(a) %}", "{% endmacro %}", "{{ f(9) }}", "{{ raise_exception('no') }}"),
        *("{{ range(99999) | list }}", "{{ 'a' * 99999 }}", "{{ x[0] }}", "{{ m.__class__ }}"),
        *("{% generation %}", "{% endgeneration %}", "{% include 'a' %}", "{{ loop.index }}", "{"),
        *("{% set x = [x, x] %}", "{% set x = {'a': x, 'b': x} %}", "{{ x == [x] }}", "{{ x }}"),
    ]
)


@fuzzed(400)
@given(source=st.lists(PIECES, max_size=12).map("".join))
def test_any_template(source):
    with soon_or_refused():
        messages = [{"role": "user", "content": "hi"}]
        render_chat(source, messages, add_generation_prompt=True, variables={})


def test_there_were_ten_thousand(request):
    tests = [each.name for each in request.session.items if each.path == request.path]
    if len(tests) < 12:
        pytest.skip("not all of them have run")
    assert opened >= 10_000
