"""`python -m jaxserve`, for when the `jaxserve` script is not on PATH."""

import sys

from jaxserve.cli import main

sys.exit(main())
