"""Counts over the results of a batch job."""

from __future__ import annotations

import dataclasses
from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Self

from jaxserve.offline.journal import Result
from jaxserve.protocol.usage import num_tokens


def _ints() -> array[int]:
    return array("q")


@dataclasses.dataclass
class JobTotals:
    """Counts over results. `errors` counts by code, and `examples` has one message per code."""

    lines: int = 0
    prompt_tokens: array[int] = dataclasses.field(default_factory=_ints)
    output_tokens: array[int] = dataclasses.field(default_factory=_ints)
    errors: Counter[str] = dataclasses.field(default_factory=Counter)
    examples: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, results: Iterable[Result]) -> Self:
        totals = cls()
        for result in results:
            totals.add(result)
        return totals

    def add(self, result: Result) -> None:
        self.lines += 1
        error = result.content["error"]
        if error is not None:
            self.errors[error["code"]] += 1
            self.examples.setdefault(error["code"], error["message"])
            return
        prompt, output = num_tokens(result.content["response"]["body"]["usage"])
        self.prompt_tokens.append(prompt)
        self.output_tokens.append(output)

    @property
    def num_errors(self) -> int:
        return self.errors.total()

    @property
    def num_prompt_tokens(self) -> int:
        return sum(self.prompt_tokens)

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_tokens)
