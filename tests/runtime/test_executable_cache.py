"""The cache of compiled programs, where it cannot be written."""

from __future__ import annotations

import jax

from jaxserve.runtime.programs.compilation.executable_cache import ExecutableCache


def test_a_disk_that_cannot_be_written_is_warned_of_once(tmp_path, monkeypatch, caplog):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))
    (tmp_path / "programs").write_text("no directory")
    cache = ExecutableCache("an engine", jax.devices()[:1])
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    for name in ("one", "other"):
        cache.store(name, cache.entry(name, lowered), lowered.compile())
        assert cache.load(name) is None
    (record,) = caplog.records
    assert "set JAXSERVE_CACHE" in record.getMessage()
