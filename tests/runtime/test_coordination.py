"""The store that hosts share, of which JAX has no public name: that it does what is said of it."""

from __future__ import annotations

import re
from pathlib import Path

from scripts import run_script

ROOT = Path(__file__).parents[2]


def test_only_these_modules_know_what_jax_hides():
    """The store, and what `jax.distributed.initialize` detects."""
    knowing = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "jaxserve").rglob("*.py")
        if re.search(r"(from|import) jax\._src", path.read_text())
    }
    assert knowing == {"jaxserve/runtime/coordination.py", "jaxserve/distributed/runtime.py"}


def test_values_are_set_waited_for_listed_and_deleted():
    run_script(
        """
        import socket, threading, time
        import jax, pytest
        jax.config.update("jax_platforms", "cpu")
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=1, process_id=0)
        from jaxserve.runtime.coordination import Store, StoreError

        store = Store()
        store.set("job/a", b"\\x00\\xff")
        assert store.get("job/a", 1.0) == b"\\x00\\xff"
        with pytest.raises(StoreError):
            store.set("job/a", b"again")
        store.set("job/a", b"again", overwrite=True)
        store.set("jobs/c", b"of another")
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            store.get("job/b", 0.3)
        assert 0.2 < time.monotonic() - begin < 5
        threading.Timer(0.2, store.set, ("job/b", b"late")).start()
        assert store.get("job/b", 10.0) == b"late"
        assert store.list("job/") == {"job/a": b"again", "job/b": b"late"}
        store.delete("job/a")
        assert store.list("job/") == {"job/b": b"late"}
        jax.distributed.shutdown()
        with pytest.raises(StoreError):
            store.set("job/d", b"")
        """,
        timeout_s=120,
    )
