"""`python -m jaxserve.cli`, for when the `jaxserve` script is not on PATH."""

import sys

from jaxserve.cli import main

sys.exit(main())
