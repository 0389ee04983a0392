"""Tiny models on disk with what the oracle says of them, and ways to drive engines of them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import family_members
import jax
import numpy as np
import oracle
from tiny_checkpoints import CONFIG, hf_shapes, write_hf

from jaxserve.core.events import Dispatched
from jaxserve.core.model_config import ModelConfig
from jaxserve.core.requests.outputs import RequestOutput
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.llm import LLM
from jaxserve.models.family import Family, Params, ParamSpec
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.params import load_params
from jaxserve.models.quantization import with_formats
from jaxserve.models.registry import get_family
from pallas_kernels.quantized_matmul import dequantize, quantize

PROMPT_LENGTHS = (1, 2, 3, 4, 5, 15, 16, 17, 32, 33, 60, 100)
"""Around page and chunk boundaries; the last few take several chunks."""
LONGEST = 24
"""Tokens the oracle continues each prompt by."""
CONTEXT = 128
EOS = 2
MAX_SEQS = 4
BUDGET = MAX_SEQS + 32
NUM_PAGES = 41
PAGE_SIZE = 4
MIN_MARGIN = 1e-4
"""Lead of the best logit over the second that no order of summation can undo in float32."""
QUANTIZED_MARGIN = 0.01
"""The same with quantized KV, of which another order of summation can round a number to the other
of two neighbouring steps."""

FULL = SamplingParams(
    temperature=1.2,
    top_p=0.95,
    top_k=50,
    min_p=0.01,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
    seed=11,
    max_tokens=LONGEST,
    min_tokens=20,
    logit_bias={40: 3.0, 41: -50.0},
    bad_words=("ab", "c"),
    stop_token_ids=(50, 60),
)
"""One of each, so that a preempted sequence has all of its state to restore."""

_GOLDEN = Path(__file__).parents[1] / "models" / "golden" / "families.json"


@dataclasses.dataclass(eq=False)
class TinyModel:
    """A random model in a directory, and its parameters for the oracle."""

    path: Path
    family: Family
    config: ModelConfig
    params: Params = dataclasses.field(repr=False)
    kv_cache_dtype: str = "auto"

    @classmethod
    def write_llama(cls, directory: Path, **changes: Any) -> TinyModel:
        """Vocabulary of 256, one token for each byte. It ends some of its answers by itself.
        `changes` are of its config.json."""
        raw = CONFIG | {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "eos_token_id": EOS,
            **changes,
        }
        return cls._write(directory, raw, hf_shapes(raw))

    @classmethod
    def write_member(cls, directory: Path, name: str) -> TinyModel:
        """A member of a family (family_members.MEMBERS). Its vocabulary is smaller than that of
        its tokenizer, so that it can be spoken to in token ids alone."""
        return cls.open(write_hf(directory / "model", *member(name)))

    @classmethod
    def _write(cls, directory: Path, raw: dict[str, Any], shapes: dict[str, Any]) -> TinyModel:
        return cls.open(write_hf(directory / "model", raw, family_members.tensors(shapes)))

    @classmethod
    def open(cls, path: Path) -> TinyModel:
        """Any model of at most CONTEXT tokens."""
        checkpoint = open_checkpoint(path)
        family = get_family(checkpoint.config.architecture)
        params = load_params(checkpoint, family.param_specs(checkpoint.config), dtype="float32")
        return cls(path, family, checkpoint.config, params)

    def settings(self, **changes: Any) -> dict[str, Any]:
        """Settings of a small engine whose pool is too tight for four long sequences."""
        settings = {
            "max_model_len": CONTEXT,
            "max_num_seqs": MAX_SEQS,
            "max_num_batched_tokens": BUDGET,
            "page_size": PAGE_SIZE,
        } | changes
        pool_bytes = NUM_PAGES * self.token_bytes * settings["page_size"]
        quantized = {"kv_cache_dtype": self.kv_cache_dtype} if self.is_quantized else {}
        return {"kv_cache_memory_bytes": pool_bytes, **quantized} | settings

    @property
    def is_quantized(self) -> bool:
        """Whether its KV is."""
        return self.kv_cache_dtype != "auto"

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's KV: float32, or bytes and a float32 scale for each head."""
        size = self.config.kv_bytes_per_token(1)
        if not self.is_quantized:
            return 4 * size
        elements = size // 2 if self.kv_cache_dtype == "int4" else size
        return elements + 4 * size // self.config.head_dim

    def with_kv(self, kv_cache_dtype: str) -> TinyModel:
        """The same model with its KV quantized, for the oracle and for the engine."""
        return dataclasses.replace(self, kv_cache_dtype=kv_cache_dtype)

    def load(self, **changes: Any) -> LLM:
        return LLM(self.path, **self.settings(**changes))

    @functools.cached_property
    def prompts(self) -> list[list[int]]:
        """Prompts of PROMPT_LENGTHS tokens."""
        rng = np.random.RandomState(3)
        return [rng.randint(3, self.config.vocab_size, n).tolist() for n in PROMPT_LENGTHS]

    @functools.cached_property
    def answers(self) -> list[list[int]]:
        """The oracle's LONGEST next tokens after each prompt, the end of text disregarded."""
        answers = []
        for prompt in self.prompts:
            tokens = list(prompt)
            while len(tokens) < len(prompt) + LONGEST:
                logits = self.logits(tokens)[-1]
                second, best = np.sort(logits)[-2:]
                assert best - second > MIN_MARGIN, "rounding could decide between two tokens"
                tokens.append(int(logits.argmax()))
            answers.append(tokens[len(prompt) :])
        return answers

    def answer(self, index: int, max_tokens: int, ignore_eos: bool) -> list[int]:
        """What an engine must generate greedily after `prompts[index]`."""
        tokens = self.answers[index][:max_tokens]
        for place, token in enumerate(tokens):
            if token in self.config.eos_token_ids and not ignore_eos:
                return tokens[: place + 1]
        return tokens

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Oracle logits float32 [tokens, vocab] after each of the tokens."""
        padded = np.zeros(CONTEXT, np.int32)
        padded[: len(token_ids)] = token_ids
        logits = oracle.dense_logits(
            self.family, self.params, self.config, padded, self.kv_cache_dtype
        )
        return logits[: len(token_ids)]

    def check_greedy(self, output: RequestOutput) -> None:
        """Each token of an output must be the oracle's most likely after all before it."""
        prompt = list(output.prompt_token_ids)
        for completion in output.outputs:
            tokens = prompt + list(completion.token_ids)
            logits = self.logits(tokens)[len(prompt) - 1 : -1]
            chosen = logits[np.arange(len(logits)), tokens[len(prompt) :]]
            shortfalls = logits.max(axis=1) - chosen
            margin = QUANTIZED_MARGIN if self.is_quantized else MIN_MARGIN
            assert (shortfalls < margin).all(), (shortfalls.max(), completion)

    def rounded(self, quantization: str) -> TinyModel:
        """The model with its weights as `quantization` rounds them, dense again, for the oracle."""
        specs = with_formats(self.family.param_specs(self.config), quantization, lambda _: None)

        def rounded(spec: ParamSpec, param: jax.Array) -> jax.Array:
            if spec.format is None:
                return param
            packed = quantize(param.reshape(spec.matrix), spec.format)
            return dequantize(packed).reshape(spec.shape)

        all_rounded = jax.jit(lambda params: jax.tree.map(rounded, specs, params))
        return dataclasses.replace(self, params=all_rounded(self.params))

    def logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """Oracle log probabilities float64 [tokens, vocab] of what follows each of the tokens."""
        logits = self.logits(token_ids).astype(np.float64)
        shifted = logits - logits.max(axis=1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request added before step `step`."""

    prompt: list[int]
    params: SamplingParams
    step: int = 0
    priority: int = 0
    tenant: str | None = None
    cache_salt: str | None = None


_ids = itertools.count()


def drive(
    engine: Engine, arrivals: Sequence[Arrival], between: Callable[[], Any] = lambda: None
) -> list[RequestOutput]:
    """Outputs of requests that arrive while others run, in the order given. `between` is called
    after each step."""
    requests = {}
    for step in itertools.count():
        for index, arrival in enumerate(arrivals):
            if arrival.step == step:
                requests[index] = engine.add(
                    f"driven-{next(_ids)}",
                    arrival.prompt,
                    arrival.params,
                    arrival.priority,
                    arrival.tenant,
                    cache_salt=arrival.cache_salt,
                )
        if len(requests) == len(arrivals) and not engine.has_work:
            break
        engine.step()
        between()
    assert_idle(engine)
    return [engine.output(requests[index]) for index in range(len(arrivals))]


def generate(llm: LLM, prompt: list[int] | str, params: SamplingParams) -> RequestOutput:
    """The output of one request alone."""
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output


def member(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The config.json and the tensors of a member of a family (family_members.MEMBERS)."""
    found = json.loads(_GOLDEN.read_text(encoding="utf-8"))["members"][name]
    return found["config"], family_members.tensors(found["shapes"])


def wider_member(name: str, times: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """As `member`, of latents, with all sizes but the number of experts so many times as large."""
    found = json.loads(_GOLDEN.read_text(encoding="utf-8"))["members"][name]
    raw, experts = found["config"], found["config"]["n_routed_experts"]
    widths = ("hidden_size", "vocab_size", "head_dim", "qk_head_dim", "v_head_dim")
    widths += ("intermediate_size", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank")
    widths += ("qk_nope_head_dim", "qk_rope_head_dim")
    raw |= {name: times * raw[name] for name in widths}
    shapes = {
        name: [size if size == experts else times * size for size in shape]
        for name, shape in found["shapes"].items()
    }
    return raw, family_members.tensors(shapes)


def preemptions(engine: Engine) -> int:
    return int(engine.get_metrics()["vllm:num_preemptions_total"].value)


def assert_loads(engine: Engine) -> None:
    """Every token that a step computed took its experts in every layer that has some. The engine
    keeps its events."""
    moe, loads = engine.plan.shapes.model.moe, engine.counters.expert_loads
    steps = [record for record in engine.log.records if isinstance(record, Dispatched)]
    computed = sum(step.decode_rows + step.prefill_tokens for step in steps)
    expected = [moe.num_experts_per_tok * computed] * sum(moe.sparse_layers)
    assert steps and loads.tokens.sum(axis=1).tolist() == expected, (loads, expected)


def assert_idle(engine: Engine) -> None:
    """Nothing runs, waits or holds memory."""
    scheduler = engine.scheduler
    assert not scheduler.has_work
    assert (scheduler.num_running, scheduler.num_waiting, engine.kv.pool.num_used) == (0, 0, 0)
