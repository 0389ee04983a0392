"""`python -m jaxserve.cli`, for when the `jaxserve` script is not on PATH."""

import sys

from jaxserve.__main__ import main

sys.exit(main())
