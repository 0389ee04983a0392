"""Steps and tokens a second with speculation and without, and whether the tokens are the same.

    python benchmarks/speculation.py [MODEL] [--drafter JSON ...] [--streams 1 4] [--tokens 48]
                                     [--prompts KIND ...] [--dtype DTYPE]

An engine without speculation and one for each drafter (a `speculative_config`; by default prompt
lookup and the first 24 layers of the model) serve the same requests: prompts to copy from, tables
to continue, questions, chats and forms to fill in, greedy, and seeded with one stream. Rounds of
all engines alternate, and the best speed of each is reported, beside the steps in which a stream
decoded its tokens after the first: without speculation there is one for each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time

import jax
from table import print_table

from jaxserve import LLM, SamplingParams
from jaxserve.core.requests.outputs import RequestOutput
from jaxserve.core.settings.speculative import SpeculativeConfig

ROUNDS = 2
DRAFTERS = (
    {"method": "ngram", "num_speculative_tokens": 3},
    {"method": "layer_skip", "num_layers": 24, "num_speculative_tokens": 3},
)
TEXT = (
    "The lighthouse keeper climbed the stairs every evening at six. He lit the lamp, wiped the "
    "glass and wrote the weather into a grey book. On clear nights he could count the boats of the "
    "village, and he knew each of them by its light. When fog came in from the north he rang the "
    "bell, twice every minute, until the last boat had found the harbour."
)
ROWS = "".join(f"| item {i} | box {i} | shelf 4 | in stock |\n" for i in range(1, 9))
PROMPTS = {
    "copy a text": f"{TEXT}\n\nThe same text again:\n\n{TEXT[:60]}",
    "continue a table": f"| name | place | shelf | state |\n|---|---|---|---|\n{ROWS}",
    "questions": "Q: Why is the sky blue, and why are sunsets red?\nA:",
}
CHATS = {
    "chat: advice": "Give me three tips for a good night's sleep.",
    "chat: a poem": "Write a short poem about the sea.",
}
FORMS = {
    "fill in a form": (
        "Anna Berg is 41 years old. She lives in Oslo and likes green. As JSON: ",
        {
            "type": "object",
            "properties": {
                "first_name": {"type": "string", "maxLength": 12},
                "age_in_years": {"type": "integer", "minimum": 0, "maximum": 150},
                "place_of_residence": {"type": "string", "maxLength": 12},
                "favourite_colour": {"enum": ["red", "green", "blue"]},
            },
            "required": ["first_name", "age_in_years", "place_of_residence", "favourite_colour"],
            "additionalProperties": False,
            "x-guidance": {"whitespace_flexible": False},
        },
    )
}
KINDS = (*PROMPTS, *CHATS, *FORMS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--drafter", type=json.loads, nargs="+", default=DRAFTERS)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompts", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--dtype", help="of weights, activations and KV")
    options = parser.parse_args()
    most = max(options.streams)
    lengths = [SpeculativeConfig.of(config).lengths[-1] for config in options.drafter]
    settings = {
        "max_num_seqs": most,
        "max_model_len": 512,
        "max_num_batched_tokens": most * (1 + max(lengths)) + 64,
        "dtype": options.dtype,
    }
    if options.model is not None:
        settings["model"] = options.model
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(LLM(**settings, speculative_config=config))
            for config in (None, *options.drafter)
        ]
        dtype = engines[0].engine.plan.config.dtype
        rows = [
            measure(engines, kind, heat, streams, options.tokens)
            for streams in options.streams
            for heat in ((0.0, 0.7) if streams == 1 else (0.0,))
            for kind in options.prompts
        ]
    columns = ["prompts", "sampling", "streams", "none, tok/s", "steps"]
    for config in options.drafter:
        columns += [f"{SpeculativeConfig.of(config).method}, tok/s", "ratio", "steps"]
    device = jax.devices()[0].device_kind
    title = f"{options.tokens} tokens a request or those of a form, equal tokens, {dtype}"
    print_table(f"{title}, {device}", columns, rows)


def measure(
    engines: list[LLM], kind: str, heat: float, streams: int, tokens: int
) -> tuple[object, ...]:
    """A row of the table. Raises AssertionError when speculation changed a token."""
    prompts = [prompt_of(engines[0], kind)] * streams
    form = {"structured_outputs": {"json": FORMS[kind][1]}} if kind in FORMS else {}
    params = [
        SamplingParams(temperature=heat, seed=i, max_tokens=tokens, ignore_eos=not form, **form)
        for i in range(streams)
    ]
    best = [0.0] * len(engines)
    before = [accepted(llm) for llm in engines]
    for _ in range(ROUNDS):
        answers: list[list[RequestOutput]] = []
        for place, llm in enumerate(engines):
            begin = time.perf_counter()
            answers.append(llm.generate(prompts, params, use_tqdm=False))
            seconds = time.perf_counter() - begin
            count = sum(len(answer.outputs[0].token_ids) for answer in answers[-1])
            best[place] = max(best[place], count / seconds)
        for others in zip(*answers):
            assert len({tuple(one.outputs[0].token_ids) for one in others}) == 1, kind
    row: list[object] = [kind, f"temperature {heat}" if heat else "greedy", streams, best[0]]
    row.append(round(count / streams - 1))
    for place, llm in enumerate(engines[1:], 1):
        gained = (accepted(llm) - before[place]) / (ROUNDS * streams)
        row += [best[place], best[place] / best[0], round(count / streams - 1 - gained)]
    return tuple(row)


def prompt_of(llm: LLM, kind: str) -> str | list[int]:
    if kind in FORMS:
        return FORMS[kind][0]
    if kind in PROMPTS:
        return PROMPTS[kind]
    return llm.chat_prompt([{"role": "user", "content": CHATS[kind]}])


def accepted(llm: LLM) -> int:
    """Draft tokens accepted so far."""
    return int(llm.get_metrics()["vllm:spec_decode_num_accepted_tokens_total"].value)


if __name__ == "__main__":
    main()
