"""The `jaxserve` command, and `python -m jaxserve` for when the script is not on PATH."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run the command line of this process, as `jaxserve.cli.main`.

    Until its modules are imported, Ctrl-C ends the process at once: in the midst of an import
    KeyboardInterrupt is printed as a traceback, lost in a callback, or ends the process otherwise.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from jaxserve.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
