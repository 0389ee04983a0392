"""What mkdocs makes of sources that are not pages: the README, the command line's own help."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are generated."""
    readme = (ROOT / "README.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=readme))
    files.append(File.generated(config, "reference/cli.md", content=_command_line()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links that leave the documents lead to the repository."""
    depth = page.file.src_uri.count("/") + (page.file.src_uri != "index.md")
    up = "../" * depth
    tree = f"{config['repo_url']}/blob/main/"
    outside = (
        r"(?:jaxserve|pallas_kernels|sharding_rules|tests|benchmarks|colab|docker"
        r"|LICENSE|CONTRIBUTING|CHANGELOG|CITATION|pyproject)"
    )
    return re.sub(rf"\]\({re.escape(up)}({outside}[^)\s]*)\)", rf"]({tree}\1)", markdown)


def _command_line() -> str:
    """The help of every command, as it prints it."""
    pages = ["# Command line", _block(_help())]
    for name in _commands():
        pages += [f"## jaxserve {name}", _block(_help(*name.split()))]
    return "\n\n".join(pages) + "\n"


def _commands() -> list[str]:
    from typing import get_args

    from jaxserve.cli import Subcommand
    from jaxserve.cli.bench import BenchCommand

    names = [get_args(command)[1].name for command in get_args(Subcommand)]
    kinds = [f"bench {get_args(kind)[1].name}" for kind in get_args(BenchCommand)]
    at = names.index("bench") + 1
    return [*names[:at], *kinds, *names[at:]]


def _help(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "jaxserve", *command, "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "96", "NO_COLOR": "1", "TERM": "dumb"},
    )
    return done.stdout


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"
