"""`jaxserve convert`: convert any model to a checkpoint that loads by shard."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from jaxserve.cli.arguments.options import Common
from jaxserve.cli.arguments.values import OptionalDtype
from jaxserve.core.process.terminal_progress import TerminalProgress


@dataclasses.dataclass(frozen=True)
class Convert(Common):
    """Write a model as an Orbax checkpoint, from which each device loads only its shard.

    Attributes:
        source: a .gguf file, a directory, a Hugging Face id, or the name of the default model.
        destination: a new directory, which can then be used as a model.
        dtype: dtype of the stored weights: float32, bfloat16 (bf16) or float16 (fp16); by default
            the fastest on this machine.
    """

    source: Annotated[Positional[str], arg(metavar="SRC")]
    destination: Annotated[Positional[Path], arg(metavar="DST")]
    dtype: OptionalDtype = None

    def run(self) -> int:
        from jaxserve.models.loading.convert import convert

        with TerminalProgress() as progress:
            written = convert(
                self.source,
                self.destination,
                dtype=self.dtype,
                progress=functools.partial(progress, "weights"),
            )
        print(written)
        return 0
