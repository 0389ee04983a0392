"""The `jaxserve` command, and `python -m jaxserve` for when the script is not on PATH."""

from __future__ import annotations

import sys

from jaxserve.core.process.signals import end_on_interrupt


def main() -> int:
    """Run the command line of this process, as `jaxserve.cli.main`."""
    end_on_interrupt()
    from jaxserve.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
