"""The `jaxserve` command. One module per subcommand; each imports JAX only when it runs."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro
from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from jaxserve.cli.batch import Batch
from jaxserve.cli.bench import Bench
from jaxserve.cli.chat import Chat
from jaxserve.cli.compile import Compile
from jaxserve.cli.convert import Convert
from jaxserve.cli.generate import Generate
from jaxserve.cli.launch import Launch
from jaxserve.cli.plan import Plan
from jaxserve.cli.serve import Serve
from jaxserve.core.errors import JaxserveError
from jaxserve.core.version import __version__

_DESCRIPTION = """\
Generate text with large language models, compiled ahead of time by JAX.

Examples:
  jaxserve generate "Why is the sky blue?"      downloads a small model on first use
  jaxserve chat                                 chat with the model
  jaxserve generate "Hi" --model ./my-model     a directory, a .gguf file, or org/name
  jaxserve plan ./my-model                      memory use and maximum concurrency
  jaxserve bench offline                        throughput on this machine

See `jaxserve COMMAND --help` for each command. `jaxserve --version` prints the version.
"""

Command = (
    Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Chat, tyro.conf.subcommand("chat")]
    | Annotated[Batch, tyro.conf.subcommand("batch")]
    | Annotated[Serve, tyro.conf.subcommand("serve")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Launch, tyro.conf.subcommand("launch")]
    | Annotated[Plan, tyro.conf.subcommand("plan")]
    | Annotated[Compile, tyro.conf.subcommand("compile")]
    | Annotated[Convert, tyro.conf.subcommand("convert")]
)


@dataclasses.dataclass(frozen=True)
class _Arguments:
    command: OmitArgPrefixes[OmitSubcommandPrefixes[Command]]


_CONSTRUCTORS = ConstructorRegistry()


@_CONSTRUCTORS.primitive_rule
def _numbers(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[tuple[int, ...]] | None:
    """Parses integers as one comma-separated argument. As several arguments they would be ambiguous
    with the positional arguments that follow."""
    if info.type != tuple[int, ...]:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT,INT,...",
        instance_from_str=lambda words: tuple(map(int, words[0].split(","))),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda numbers: [",".join(map(str, numbers))],
    )


def parse(args: Sequence[str]) -> Command:
    """Parse `args` into a command. Raises SystemExit(2), after printing the reason, for invalid
    arguments, and JaxserveError for values out of range."""
    with _CONSTRUCTORS:
        return tyro.cli(_Arguments, prog="jaxserve", description=_DESCRIPTION, args=args).command


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line `args` (the process's own by default) and return its exit status.

    0 is success, 1 a JaxserveError, printed as one line, 130 Ctrl-C, and 141 a broken stdout pipe.
    Raises SystemExit(2) for arguments that cannot be parsed.
    """
    args = sys.argv[1:] if args is None else list(args)
    if args == ["--version"]:
        print(f"jaxserve {__version__}")
        return 0
    try:
        status = parse(args).run()
        sys.stdout.flush()
        return status
    except JaxserveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The interpreter flushes stdout again at exit, which must not hit the broken pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
