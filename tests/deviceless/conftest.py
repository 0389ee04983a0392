"""These tests compile for accelerators that need not be there, only their compilers do."""

from __future__ import annotations


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "deviceless: compiles for an accelerator that is not there; needs its plugin"
    )
