"""`jaxserve generate`: one prompt, one streamed response."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from jaxserve.cli.arguments.options import Common, EngineOptions, Sampling, load, one_at_a_time
from jaxserve.cli.terminal.streaming import StreamedResponse, receive
from jaxserve.cli.terminal.text import device_name, summary
from jaxserve.core.errors import ModelError, RequestError, SnapshotError
from jaxserve.core.process.signals import INTERRUPTED
from jaxserve.metrics.summaries import RunSummary

if TYPE_CHECKING:
    from jaxserve.engine.delta_stream import DeltaStream
    from jaxserve.llm import LLM


@dataclasses.dataclass(frozen=True)
class Generate(Common):
    """Stream the response to one prompt to standard output.

    Attributes:
        prompt: the prompt; "-", or none, reads it from standard input.
        system: system prompt.
        n: number of answers to sample; at temperature 0 they are equal.
        raw: continue the prompt as is, without the model's chat template.
        json: print the answers, their token ids and the times as one JSON object at the end.
        trace_file: write a trace of the run, to open in ui.perfetto.dev.
        snapshot_dir: on SIGTERM, write a snapshot of the request to this directory and exit with
            status 75; the next run with the same arguments resumes it.
        snapshot_deadline_s: approximate time limit for writing the snapshot.
    """

    prompt: Annotated[Positional[str], arg(metavar="PROMPT")] = "-"
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    system: str | None = None
    n: Annotated[int, arg(aliases=["-n"])] = 1
    raw: bool = False
    json: bool = False
    trace_file: Path | None = None
    snapshot_dir: Path | None = None
    snapshot_deadline_s: float = 20.0
    engine: EngineOptions = dataclasses.field(default_factory=one_at_a_time)

    def __post_init__(self) -> None:
        """Raises RequestError before the model is loaded."""
        self.sampling.check(n=self.n)
        if self.raw and self.system is not None:
            raise RequestError("system has no effect with --raw; leave one of them out.")

    def run(self) -> int:
        text = _read_prompt() if self.prompt == "-" else self.prompt
        if not text:
            raise RequestError("there is no prompt; give it as an argument or through a pipe.")
        with load(self.engine, self.trace_file) as llm:
            prompt = self._laid_out(llm, text)
            with self._resumable(llm) as streams:
                response = receive(self._stream(llm, prompt, streams), show=not self.json)
            if self.json:
                print(json.dumps(_document(llm, response)))
            print(summary(llm), file=sys.stderr)
        return INTERRUPTED if response.interrupted else 0

    def _laid_out(self, llm: LLM, text: str) -> str | list[int]:
        """The prompt in the model's chat template, if it has one."""
        if self.raw or llm.get_tokenizer().chat_template is None:
            if self.system is not None:
                raise ModelError(
                    f"{str(self.engine.model)!r} has no chat template, so it takes no system "
                    "prompt; put it into the prompt."
                )
            return text
        opening = [] if self.system is None else [{"role": "system", "content": self.system}]
        return llm.chat_prompt([*opening, {"role": "user", "content": text}])

    def _resumable(self, llm: LLM) -> contextlib.AbstractContextManager[list[DeltaStream]]:
        if self.snapshot_dir is None:
            return contextlib.nullcontext([])
        from jaxserve.resume import resumable

        return resumable(llm, self.snapshot_dir, self.snapshot_deadline_s)

    def _stream(self, llm: LLM, prompt: str | list[int], stopped: list[DeltaStream]) -> DeltaStream:
        """A new stream, or the resumed one. Raises SnapshotError if that is of another request."""
        params = self.sampling.params(llm, n=self.n)
        if params.n > 1 and params.greedy:
            print("At temperature 0 all answers are equal; set --temperature.", file=sys.stderr)
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


def _read_prompt() -> str:
    """The prompt from standard input."""
    if sys.stdin.isatty():
        print("Type the prompt, then Ctrl-D on a line of its own.", file=sys.stderr)
    return sys.stdin.buffer.read().decode("utf-8", "replace").removesuffix("\n")


def _document(llm: LLM, response: StreamedResponse) -> dict[str, Any]:
    """What --json prints; times are in seconds, and null where nothing was generated."""
    run = RunSummary.of(llm.engine.metrics.finished())
    return {
        "model": llm.plan().checkpoint.path.name,
        "device": device_name(llm.plan().device),
        "answers": [dataclasses.asdict(answer) for answer in response.answers],
        "prompt_tokens": response.prompt_tokens,
        "output_tokens": sum(len(answer.token_ids) for answer in response.answers),
        "time_to_first_token_s": None if run is None else run.ttft_us.p50 / 1e6,
        "time_s": None if run is None else run.elapsed_us / 1e6,
    }
