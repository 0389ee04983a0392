"""`jaxserve generate`: one prompt, one streamed response."""

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
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import SnapshotError
from jaxserve.metrics.summaries import RunSummary

if TYPE_CHECKING:
    from jaxserve.engine.delta_stream import DeltaStream
    from jaxserve.llm import LLM


@dataclasses.dataclass(frozen=True)
class Generate:
    """Stream the response to one prompt to standard output.

    Attributes:
        prompt: the prompt; "-" reads it from standard input.
        raw: continue the prompt as is, without the model's chat template.
        trace_file: write a trace of the run, to open in ui.perfetto.dev.
        snapshot_dir: on SIGTERM, write a snapshot of the request to this directory and exit with
            status 75; the next run with the same arguments resumes it.
        snapshot_deadline_s: approximate time limit for writing the snapshot.
    """

    prompt: Annotated[Positional[str], arg(metavar="PROMPT")]
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    raw: bool = False
    trace_file: Path | None = None
    snapshot_dir: Path | None = None
    snapshot_deadline_s: float = 20.0
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
        if self.snapshot_dir is None:
            return contextlib.nullcontext([])
        from jaxserve.resume import resumable

        return resumable(llm, self.snapshot_dir, self.snapshot_deadline_s)

    def _stream(self, llm: LLM, prompt: str | list[int], stopped: list[DeltaStream]) -> DeltaStream:
        """A new stream, or the resumed one. Raises SnapshotError if that is of another request."""
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
            raise SnapshotError(
                f"snapshot_dir {self.snapshot_dir} has {len(stopped)} unfinished, the first with "
                f"{', '.join(differing) or 'this prompt'}; finish those first, or give an "
                "empty directory."
            )
        return stream


def _summary(llm: LLM) -> str:
    """One line about the run: tokens, tokens/s after the first, time to first token, device."""
    device = device_name(llm.plan().device)
    run = RunSummary.of(llm.engine.metrics.finished())
    if run is None:
        return f"0 tokens, on {device}"
    pace = run.stream_tokens_per_s or run.output_tokens_per_s
    return (
        f"{run.output_tokens} tokens, {pace:.1f} tokens/s, first token after "
        f"{run.ttft_us.p50 / 1e6:.2f} s, on {device}"
    )
