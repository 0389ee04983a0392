"""`python -m jaxserve.cli`, for where the `jaxserve` script is not on the path."""

import sys

from jaxserve.cli import main

sys.exit(main())
