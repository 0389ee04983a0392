"""`jaxserve generate`: one prompt, one streamed answer."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from jaxserve.cli.options import Sampling, load, one_at_a_time
from jaxserve.cli.streaming import print_answer
from jaxserve.cli.text import device_name
from jaxserve.config import EngineConfig
from jaxserve.engine.summaries import RunSummary

if TYPE_CHECKING:
    from jaxserve.llm import LLM


@dataclasses.dataclass(frozen=True)
class Generate:
    """Stream the answer to one prompt to standard output.

    Attributes:
        prompt: what to answer; "-" reads it from standard input.
        raw: continue the prompt as it is, without the model's chat template.
        trace_file: write a timeline of the run, which opens in ui.perfetto.dev.
    """

    prompt: Annotated[Positional[str], arg(metavar="PROMPT")]
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    raw: bool = False
    trace_file: Path | None = None
    engine: EngineConfig = dataclasses.field(default_factory=one_at_a_time)

    def run(self) -> int:
        text = self.prompt
        if text == "-":
            text = sys.stdin.buffer.read().decode("utf-8", "replace").removesuffix("\n")
        with load(self.engine, self.trace_file) as llm:
            if self.raw or llm.get_tokenizer().chat_template is None:
                prompt = text
            else:
                prompt = llm.chat_prompt([{"role": "user", "content": text}])
            answer = print_answer(llm, prompt, self.sampling.params(llm))
            print(_summary(llm), file=sys.stderr)
        return 130 if answer.interrupted else 0


def _summary(llm: LLM) -> str:
    """One line about the run: tokens, their pace after the first, the wait for it, the device."""
    device = device_name(llm.plan().device)
    run = RunSummary.of(llm.engine.metrics.finished())
    if run is None:
        return f"0 tokens, on {device}"
    pace = run.stream_tokens_per_s or run.output_tokens_per_s
    return (
        f"{run.output_tokens} tokens, {pace:.1f} tokens/s, first token after "
        f"{run.ttft_us.p50 / 1e6:.2f} s, on {device}"
    )
