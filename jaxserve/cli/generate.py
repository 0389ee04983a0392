"""`jaxserve generate`: one prompt, one streamed answer."""

from __future__ import annotations

import contextlib
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
from jaxserve.errors import CheckpointError

if TYPE_CHECKING:
    from jaxserve.delta_stream import DeltaStream
    from jaxserve.llm import LLM


@dataclasses.dataclass(frozen=True)
class Generate:
    """Stream the answer to one prompt to standard output.

    Attributes:
        prompt: what to answer; "-" reads it from standard input.
        raw: continue the prompt as it is, without the model's chat template.
        trace_file: write a timeline of the run, which opens in ui.perfetto.dev.
        checkpoint_dir: when told to stop by SIGTERM, write down here what is done, and exit with
            status 75; go on from there when started again.
        checkpoint_deadline_s: about how long that may take.
    """

    prompt: Annotated[Positional[str], arg(metavar="PROMPT")]
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    raw: bool = False
    trace_file: Path | None = None
    checkpoint_dir: Path | None = None
    checkpoint_deadline_s: float = 20.0
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
            with self._resumable(llm) as streams:
                answer = print_answer(self._stream(llm, prompt, streams))
            print(_summary(llm), file=sys.stderr)
        return 130 if answer.interrupted else 0

    def _resumable(self, llm: LLM) -> contextlib.AbstractContextManager[list[DeltaStream]]:
        if self.checkpoint_dir is None:
            return contextlib.nullcontext([])
        from jaxserve.resume import resumable

        return resumable(llm, self.checkpoint_dir, self.checkpoint_deadline_s)

    def _stream(self, llm: LLM, prompt: str | list[int], stopped: list[DeltaStream]) -> DeltaStream:
        """The answer, or the rest of one. Raises CheckpointError when that is to something else."""
        params = self.sampling.params(llm)
        if not stopped:
            return llm.stream(prompt, params)
        decode = llm.get_tokenizer().decode
        (stream, *others), token_ids = stopped, llm.engine.tokenize(prompt).token_ids
        request = stream.request
        theirs = {"prompt": decode(request.prompt_token_ids)} | dataclasses.asdict(request.params)
        ours = {"prompt": decode(token_ids)} | dataclasses.asdict(params)
        differing = [
            f"{name} {theirs[name]!r} and not {ours[name]!r}"
            for name in ours
            if theirs[name] != ours[name]
        ]
        if others or differing:
            raise CheckpointError(
                f"{self.checkpoint_dir} has {len(stopped)} unfinished, the first with "
                f"{', '.join(differing) or 'this prompt'}; end what was begun there, or give an "
                "empty directory."
            )
        return stream


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
