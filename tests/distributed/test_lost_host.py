"""Who is said to be lost, by what each host said last."""

from __future__ import annotations

import pytest

from jaxserve.runtime.hardware.hosts import lost_one

NOW, LONG_AGO, JUST_NOW = 100.0, 80.0, 99.0
SILENT = "host 3 was lost: silent for 12 s"


@pytest.mark.parametrize(
    "heard, waited_s, lost",
    [
        ({0: ("7", JUST_NOW), 3: ("8", JUST_NOW)}, 60.0, None),
        ({0: ("7", JUST_NOW), 3: ("8", LONG_AGO)}, 0.0, SILENT),
        # A host that is done may have left, unless it is waited for.
        ({0: ("left", LONG_AGO), 3: ("8", JUST_NOW)}, 0.0, None),
        ({0: ("left", LONG_AGO), 3: ("8", JUST_NOW)}, 60.0, "host 0 has closed its engine"),
        # Host 0 has left because of host 3, whose silence is seen here too, or not yet.
        ({0: ("left", JUST_NOW), 3: ("8", LONG_AGO)}, 60.0, SILENT),
        ({0: (f"left{SILENT}", JUST_NOW), 3: ("8", JUST_NOW)}, 60.0, SILENT),
    ],
)
def test_the_first_reason_counts(heard, waited_s, lost):
    assert lost_one(heard, NOW, waited_s) == lost
