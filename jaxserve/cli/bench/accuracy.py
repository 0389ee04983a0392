"""`jaxserve bench accuracy`: answers with compressed KV against those of full attention."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from jaxserve.cli.arguments.options import Common, EngineOptions, load, one_at_a_time
from jaxserve.core.errors import ConfigError, RequestError
from jaxserve.core.process.tables import table
from jaxserve.core.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Accuracy(Common):
    """Compare greedy answers with --kv-compression to those of full attention.

    Each prompt is answered twice, by an engine with the settings given and by one without
    --kv-compression.

    Attributes:
        prompts: a text file, of which each line is a prompt, or with --whole all of it; "-" is
            standard input.
        whole: the file is one prompt.
        max_tokens: tokens of an answer.
    """

    prompts: Annotated[Positional[Path], arg(metavar="FILE")] = Path("-")
    whole: bool = False
    max_tokens: int = 64
    engine: EngineOptions = dataclasses.field(default_factory=one_at_a_time)

    def __post_init__(self) -> None:
        """Raises ConfigError before a model is loaded."""
        if self.engine.kv_compression == "none":
            raise ConfigError(
                "kv_compression is 'none', so there is nothing to compare; set it to 'shadow' or "
                "'sparf', and kv_on to 'host'."
            )
        if self.max_tokens < 2:
            raise ConfigError(
                f"max_tokens is {self.max_tokens}; it must be 2 or more, since the first token is "
                "exact."
            )

    def run(self) -> int:
        prompts = self._read()
        names = [field.name for field in dataclasses.fields(self.engine)]
        of_compression = [name for name in names if name.startswith(("shadow_", "sparf_"))]
        others = dict.fromkeys(of_compression, None)
        full = dataclasses.replace(self.engine, kv_compression="none", **others)
        expected, _, _ = self._answers(full, prompts)
        found, compressed, read = self._answers(self.engine, prompts)
        print(report(expected, found, compressed, read))
        return 0

    def _read(self) -> list[str]:
        """Raises RequestError for a file that cannot be read, or without prompts."""
        try:
            name = str(self.prompts)
            text = sys.stdin.read() if name == "-" else self.prompts.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"{self.prompts} cannot be read: {error}.") from error
        prompts = [text] if self.whole else text.splitlines()
        prompts = [prompt for prompt in prompts if prompt.strip()]
        if not prompts:
            raise RequestError(f"there are no prompts in {self.prompts}; write one in each line.")
        return prompts

    def _answers(
        self, engine: EngineOptions, prompts: Sequence[str]
    ) -> tuple[list[tuple[int, ...]], int, tuple[str, float]]:
        """The tokens of each answer, how many had compressed KV, and what share of something was
        read from the host."""
        params = SamplingParams(temperature=0.0, max_tokens=self.max_tokens)
        with load(engine, None) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            host = llm.plan().memory.host_kv
            lengths = [
                min(len(output.prompt_token_ids) + self.max_tokens, llm.plan().config.max_model_len)
                for output in outputs
            ]
            long = sum(host.on_host(length) > 0 for length in lengths)
            answers = [tuple(output.outputs[0].token_ids) for output in outputs]
            read = ("values copied, of those attended to", 0.0)
            if (counts := llm.engine.counters.recall_counts) is not None:
                read = (read[0], counts.copied_share)
            if (reads := llm.engine.counters.sparse_reads) is not None:
                read = ("tokens attended to, of those on the host", reads.share)
            return answers, long, read


def report(
    expected: Sequence[tuple[int, ...]],
    found: Sequence[tuple[int, ...]],
    compressed: int,
    read: tuple[str, float],
) -> str:
    """A table of how far the answers agree, and of what was read."""
    same, agreeing = agreement(expected, found)
    rows = [
        ("prompts", f"{len(expected):,}"),
        ("longer than the pool, so compressed", f"{compressed:,}"),
        ("answers that are the same", f"{same:,}"),
        ("tokens before the first difference", f"{agreeing:.1%}"),
        (read[0], f"{read[1]:.1%}"),
    ]
    return table(rows)


def agreement(
    expected: Sequence[tuple[int, ...]], found: Sequence[tuple[int, ...]]
) -> tuple[int, float]:
    """How many answers are the same, and the share of tokens before the first difference: what
    follows one answers another text."""
    same = sum(a == b for a, b in zip(expected, found, strict=True))
    agreeing = total = 0
    for a, b in zip(expected, found):
        differs = (place for place, pair in enumerate(zip(a, b)) if pair[0] != pair[1])
        agreeing += next(differs, min(len(a), len(b)))
        total += max(len(a), len(b))
    return same, agreeing / max(1, total)
