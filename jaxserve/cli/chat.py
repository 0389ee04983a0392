"""`jaxserve chat`: a conversation in the terminal."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.cli.arguments.options import Common, EngineOptions, Sampling, load, one_at_a_time
from jaxserve.cli.terminal.streaming import receive
from jaxserve.cli.terminal.text import device_name, summary
from jaxserve.core.errors import ModelError, RequestError

if TYPE_CHECKING:
    from jaxserve.core.requests.sampling_params import SamplingParams
    from jaxserve.llm import LLM

_HELP = """\
/system TEXT  use another system prompt from here on; /system alone removes it
/stats        tokens and times so far
/reset        forget the conversation, but not the system prompt
/help         this list
/exit         quit, as do /quit and Ctrl-D; Ctrl-C stops a response"""
_EXITS = ("/exit", "/quit")
_HINT = "/help lists the commands, /exit or Ctrl-D quits, Ctrl-C stops a response."


@dataclasses.dataclass(frozen=True)
class Chat(Common):
    """Chat with a model: one line in, one streamed response out.

    Type /help for the commands, /exit or Ctrl-D to quit; Ctrl-C stops a response.

    Attributes:
        system: system prompt.
        trace_file: write a trace of the run, to open in ui.perfetto.dev.
    """

    system: str | None = None
    trace_file: Path | None = None
    sampling: Sampling = dataclasses.field(default_factory=lambda: Sampling(max_tokens=1024))
    engine: EngineOptions = dataclasses.field(default_factory=one_at_a_time)

    def run(self) -> int:
        _say(f"{self.engine.model}: loading.")
        with load(self.engine, self.trace_file) as llm:
            if llm.get_tokenizer().chat_template is None:
                raise ModelError(
                    f"{str(self.engine.model)!r} has no chat template, so it cannot chat; "
                    "use `jaxserve generate --raw`, or an instruct model."
                )
            conversation = _Conversation(llm, self.sampling.params(llm), self.system)
            plan = llm.plan()
            _say(f"{plan.checkpoint.path.name} on {device_name(plan.device)}. {_HINT}")
            while (line := _read_line()) is not None and line not in _EXITS:
                if line.startswith("/"):
                    conversation.obey(line)
                elif line:
                    conversation.ask(line)
        return 0


class _Conversation:
    """The turns so far, and the system prompt, which is not one of them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._turns: list[dict[str, str]] = []

    def obey(self, line: str) -> None:
        """Run a command."""
        command, _, argument = line.partition(" ")
        match command:
            case "/help":
                _say(_HELP)
            case "/system":
                self._system = argument.strip() or None
                _say(
                    "There is no system prompt."
                    if self._system is None
                    else "The system prompt is set."
                )
            case "/stats":
                _say(self._stats())
            case "/reset":
                self._turns = []
            case _:
                _say(f"{command} is not a command. {_HINT}")

    def ask(self, line: str) -> None:
        """Print the response to a line. One that is refused is not part of the conversation."""
        question = {"role": "user", "content": line}
        try:
            prompt = self._llm.chat_prompt([*self._opening(), *self._turns, question])
            response = receive(self._llm.stream(prompt, self._params))
        except RequestError as error:
            # For example, the conversation exceeds the context length.
            _say(f"error: {error}\n{_HINT}")
            return
        self._turns += [question, {"role": "assistant", "content": response.answers[0].text}]

    def _opening(self) -> list[dict[str, str]]:
        return [] if self._system is None else [{"role": "system", "content": self._system}]

    def _stats(self) -> str:
        """Tokens of the conversation and of the context, and the pace so far."""
        turns = [*self._opening(), *self._turns]
        used = len(self._llm.chat_prompt(turns, add_generation_prompt=False)) if turns else 0
        context = self._llm.plan().config.max_model_len
        return f"{used:,} of {context:,} tokens of the context; so far {summary(self._llm)}"


def _say(text: str) -> None:
    print(text, file=sys.stderr)


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
