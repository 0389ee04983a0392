"""`jaxserve chat`: a conversation in the terminal."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from jaxserve.cli.options import Sampling, load, one_at_a_time
from jaxserve.cli.streaming import print_answer
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ModelError, RequestError

_HINT = "/reset clears the conversation, /exit or Ctrl-D quits, Ctrl-C stops a response."


@dataclasses.dataclass(frozen=True)
class Chat:
    """Chat with a model: one line in, one streamed response out.

    Type /reset to clear the conversation, /exit or Ctrl-D to quit; Ctrl-C stops a response.

    Attributes:
        system: system prompt.
        trace_file: write a trace of the run, to open in ui.perfetto.dev.
    """

    system: str | None = None
    trace_file: Path | None = None
    sampling: Sampling = dataclasses.field(default_factory=lambda: Sampling(max_tokens=1024))
    engine: EngineConfig = dataclasses.field(default_factory=one_at_a_time)

    def run(self) -> int:
        opening = [] if self.system is None else [{"role": "system", "content": self.system}]
        with load(self.engine, self.trace_file) as llm:
            if llm.get_tokenizer().chat_template is None:
                raise ModelError(
                    f"{str(self.engine.model)!r} has no chat template, so it cannot chat; "
                    "use `jaxserve generate --raw`, or an instruct model."
                )
            params = self.sampling.params(llm)
            messages = list(opening)
            print(_HINT, file=sys.stderr)
            while (line := _read_line()) is not None:
                if line == "/exit":
                    break
                if line == "/reset":
                    messages = list(opening)
                elif line.startswith("/"):
                    print(f"{line.split()[0]} is not a command. {_HINT}", file=sys.stderr)
                elif line:
                    question = {"role": "user", "content": line}
                    try:
                        prompt = llm.chat_prompt([*messages, question])
                        answer = print_answer(llm.stream(prompt, params))
                    except RequestError as error:
                        # For example, the conversation exceeds the context length.
                        print(f"error: {error}\n{_HINT}", file=sys.stderr)
                        continue
                    messages += [question, {"role": "assistant", "content": answer.text}]
        return 0


def _read_line() -> str | None:
    """The next line, stripped; None at end of input."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.strip() if line else None
    import readline  # noqa: F401  gives input() its line editing and history

    try:
        return input("> ").strip()
    except KeyboardInterrupt:
        print()
        return ""
    except EOFError:
        print()
        return None
