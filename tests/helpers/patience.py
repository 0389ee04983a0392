"""How long tests wait for what must happen."""

PATIENCE_S = 400
"""Longer than anything here takes on a machine ten times as slow as an idle one, and less than the
1,200 s that a test has, so that it can say what it has waited for."""
