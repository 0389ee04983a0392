"""What quantized KV costs in quality: perplexity and greedy agreement with KV as it is computed.

    python benchmarks/quantized_kv.py [MODEL] [--dtype float32] [--texts 8] [--scales]

An engine for each kv_cache_dtype scores the same texts, the first 512 tokens of long topics of the
Python reference that comes with Python (`pydoc_data`), and continues the same openings greedily.
--scales compares instead what a scale may be common to, in a dense forward pass without an engine:
of each token and head; of a page, decided by its first token; of a head, calibrated on other texts;
or none, as vLLM stores fp8 without calibrated scales; and int4 with and without its rotation.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import platform
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
from batch_invariance import OPENINGS
from table import print_table

from jaxserve import LLM, SamplingParams
from jaxserve.core.model_config import ModelConfig
from jaxserve.models.family import Attention
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.fetch import default_model_path
from jaxserve.models.loading.params import load_params
from jaxserve.models.registry import get_family
from pallas_kernels.paged_attention.layout import rotated

KINDS = ("auto", "int8", "fp8", "int4")
TEXT_TOKENS = 512
CALIBRATION_TEXTS = 2
GENERATED = 64
PAGE = 64
DTYPES = {"int8": (jnp.int8, 127.0), "fp8": (jnp.float8_e4m3fn, 448.0), "int4": (jnp.int8, 7.0)}

Read = Callable[[int, int, jax.Array], jax.Array]
"""Keys (0) or values (1) of a layer, [tokens, kv_heads, head_dim], as they are read."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, default=default_model_path())
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--scales", action="store_true")
    options = parser.parse_args()
    python = platform.python_version()
    print(f"{options.model.name}, Python {python}, on {jax.devices()[0].device_kind}\n")
    if options.scales:
        compare_scales(options.model, options.texts)
    else:
        compare_engines(options.model, options.dtype, options.texts)


def longest_topics(count: int) -> list[str]:
    """The same ones for one version of Python."""
    return sorted(topics.values(), key=len, reverse=True)[:count]


@dataclasses.dataclass(frozen=True)
class Found:
    """logprobs and most likely tokens of the texts, and tokens after each opening."""

    token_bytes: int
    logprobs: np.ndarray
    most_likely: np.ndarray
    answers: list[tuple[int, ...]]


def compare_engines(model: Path, dtype: str, count: int) -> None:
    found = {kind: run_engine(model, dtype, kind, count) for kind in KINDS}
    plain = found["auto"]
    rows = []
    for kind, of_kind in found.items():
        same = [
            next((n for n, (a, b) in enumerate(zip(*pair)) if a != b), GENERATED)
            for pair in zip(plain.answers, of_kind.answers)
        ]
        rows.append(
            (
                kind,
                of_kind.token_bytes,
                f"{math.exp(-of_kind.logprobs.mean()):.4f}",
                f"{np.mean(of_kind.most_likely == plain.most_likely):.2%}",
                f"{same.count(GENERATED)} of {len(same)}",
                float(np.mean(same)),
            )
        )
    print_table(
        f"{len(plain.logprobs):,} tokens of texts, {GENERATED} tokens after each opening, {dtype}",
        (
            "kv_cache_dtype",
            "bytes a token",
            "perplexity",
            "same most likely token",
            "same answers",
            "tokens until they differ",
        ),
        rows,
    )


def run_engine(model: Path, dtype: str, kind: str, count: int) -> Found:
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    greedy = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True)
    sizes = {"max_model_len": TEXT_TOKENS + 1, "max_num_seqs": 4, "max_num_batched_tokens": 4 + 256}
    with LLM(model, dtype=dtype, kv_cache_dtype=kind, **sizes) as llm:
        encode = llm.get_tokenizer().encode
        prompts = [encode(text)[:TEXT_TOKENS] for text in longest_topics(count)]
        logprobs, most_likely = [], []
        for prompt, output in zip(prompts, llm.generate(prompts, scored, use_tqdm=False)):
            for token, entry in zip(prompt[1:], output.prompt_logprobs[1:]):
                logprobs.append(entry[token].logprob)
                most_likely.append(next(one for one, found in entry.items() if found.rank == 1))
        outputs = llm.generate(list(OPENINGS), greedy, use_tqdm=False)
        memory = llm.plan().memory
        return Found(
            memory.page_bytes // memory.page_size,
            np.array(logprobs),
            np.array(most_likely),
            [output.outputs[0].token_ids for output in outputs],
        )


# What a scale is common to


def compare_scales(model: Path, count: int) -> None:
    checkpoint = open_checkpoint(model)
    config, family = checkpoint.config, get_family(checkpoint.config.architecture)
    params = load_params(checkpoint, family.param_specs(config), dtype="float32")
    encode = checkpoint.tokenizer().encode
    texts = [
        np.array(encode(text)[:TEXT_TOKENS], np.int32)
        for text in longest_topics(count + CALIBRATION_TEXTS)
    ]
    texts, others = texts[:count], texts[count:]

    def logits_by(read: Read) -> Callable[[np.ndarray], np.ndarray]:
        @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
        def logits(params, tokens):
            positions = jnp.arange(len(tokens), dtype=jnp.int32)
            hidden = family.forward(params, config, tokens, positions, attention_by(read, config))
            return family.logits(params, config, hidden)

        return lambda tokens: np.asarray(logits(params, tokens))

    peaks = np.zeros((config.num_layers, 2, config.num_kv_heads))

    def watch(layer: int, which: int, x: jax.Array) -> jax.Array:
        def keep(peak):
            peaks[layer, which] = np.maximum(peaks[layer, which], peak)

        jax.debug.callback(keep, jnp.max(jnp.abs(x), axis=(0, 2)))
        return x

    watched = logits_by(watch)
    for text in others:
        watched(text)
    jax.effects_barrier()
    ways: dict[str, Read] = {"not quantized": lambda layer, which, x: x}
    for kind in DTYPES:
        ways |= {
            f"{kind}, token and head": scaled_by(kind, of_token),
            f"{kind}, page, by its first token": scaled_by(kind, of_page),
            f"{kind}, head, calibrated": scaled_by(
                kind, lambda layer, which, x: peaks[layer, which][:, None]
            ),
        }
    ways["int4, token and head, rotated"] = rotated_by(scaled_by("int4", of_token))
    ways["fp8, none"] = scaled_by("fp8", lambda layer, which, x: jnp.float32(DTYPES["fp8"][1]))
    rows, plain = [], None
    for name, read in ways.items():
        logits = logits_by(read)
        found = [logits(text)[:-1] for text in texts]
        logprobs = np.concatenate(
            [
                np.asarray(jax.nn.log_softmax(each))[np.arange(len(each)), text[1:]]
                for each, text in zip(found, texts)
            ]
        )
        most_likely = np.concatenate([each.argmax(axis=1) for each in found])
        plain = most_likely if plain is None else plain
        same = f"{np.mean(most_likely == plain):.2%}"
        rows.append((name, f"{math.exp(-logprobs.mean()):.4f}", same))
    print_table(
        f"{len(plain):,} tokens of texts, float32",
        ("scale of", "perplexity", "same most likely token"),
        rows,
    )


def of_token(layer: int, which: int, x: jax.Array) -> jax.Array:
    """The largest value of each token and head."""
    return jnp.max(jnp.abs(x), axis=-1, keepdims=True)


def of_page(layer: int, which: int, x: jax.Array) -> jax.Array:
    """That of the first token of each token's page."""
    first = jnp.arange(len(x)) // PAGE * PAGE
    return of_token(layer, which, x)[first]


def scaled_by(kind: str, peak_of: Read) -> Read:
    """Rounds so that `peak_of` becomes the largest number of the dtype; what is larger is cut."""
    dtype, largest = DTYPES[kind]

    def read(layer: int, which: int, x: jax.Array) -> jax.Array:
        scale = jnp.maximum(peak_of(layer, which, x), 1e-30) / largest
        elements = jnp.clip(x / scale, -largest, largest)
        elements = jnp.round(elements) if kind != "fp8" else elements
        return elements.astype(dtype).astype(jnp.float32) * scale

    return read


def rotated_by(read: Read) -> Read:
    """Rounds what is rotated, as pages of int4 do."""
    return lambda layer, which, x: rotated(read(layer, which, rotated(x)))


def attention_by(read: Read, config: ModelConfig) -> Attention:
    """Causal attention over one whole sequence of keys and values as they are read. Raises
    ValueError for a model with sinks."""

    def attention(layer, q, k, v, *, window, sinks=None):
        if sinks is not None:
            raise ValueError("the dense pass has no attention sinks; take a model without.")
        k, v = (
            jnp.repeat(read(layer, which, x), config.queries_per_kv, axis=1)
            for which, x in enumerate((k, v))
        )
        scores = jnp.einsum("qhd,khd->hqk", q, k) * config.attention_scale
        if cap := config.attention_soft_cap:
            scores = cap * jnp.tanh(scores / cap)
        age = jnp.arange(len(q))[:, None] - jnp.arange(len(q))
        seen = (age >= 0) & (age < (window or len(q)))
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("hqk,khd->qhd", weights, v)

    return attention


if __name__ == "__main__":
    main()
