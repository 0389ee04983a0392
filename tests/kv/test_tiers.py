"""The host and disk stores: what comes out is what went in, or an error that says so."""

from __future__ import annotations

import contextlib
import mmap
import os
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S
from scripts import run_script

from jaxserve.core.errors import ConfigError
from jaxserve.kv.offload.stores import DiskStore, HostStore, PageCorruptError, page_extents

NUM_PAGES, PAGE_BYTES = 12, 96


def open_store(kind: str, directory: Path, num_pages: int = NUM_PAGES):
    if kind == "host":
        return HostStore(num_pages, PAGE_BYTES)
    return DiskStore(directory, num_pages, PAGE_BYTES)


@pytest.fixture(params=["host", "disk"])
def store(request, tmp_path):
    with contextlib.closing(open_store(request.param, tmp_path)) as opened:
        yield opened


@pytest.fixture
def disk(tmp_path):
    with contextlib.closing(DiskStore(tmp_path, NUM_PAGES, PAGE_BYTES)) as opened:
        yield opened


def payload_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, PAGE_BYTES), np.uint8)


@given(st.lists(st.integers(0, 9)))
def test_runs_cover_the_pages_in_order_and_are_longest(pages):
    extents = list(page_extents(pages))
    assert [page for _, extent in extents for page in range(extent.start, extent.stop)] == pages
    assert [i for rows, _ in extents for i in range(rows.start, rows.stop)] == list(
        range(len(pages))
    )
    assert all(before.stop != after.start for (_, before), (_, after) in pairwise(extents))


@pytest.mark.parametrize("kind", ["host", "disk"])
@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    writes=st.lists(
        st.lists(st.integers(0, NUM_PAGES - 1), unique=True, min_size=1), min_size=1, max_size=8
    ),
    padding=st.integers(0, 3),
)
def test_reads_what_was_written_last(kind, tmp_path, writes, padding):
    model = {}
    with contextlib.closing(open_store(kind, tmp_path)) as store:
        for number, pages in enumerate(writes):
            payload = payload_of(len(pages) + padding, seed=number)
            store.write(pages, payload)
            model.update(zip(pages, payload))
        pages = sorted(model, key=lambda page: model[page].tobytes())  # any order
        np.testing.assert_array_equal(store.read(pages), [model[page] for page in pages])


def test_payload_of_any_shape_and_dtype(store):
    payload = np.arange(3 * 48).reshape(3, 2, 4, 6).astype(ml_dtypes.bfloat16)
    store.write([7, 2], payload)
    read = store.read([2, 7])
    assert read.dtype == np.uint8 and read.shape == (2, PAGE_BYTES)
    np.testing.assert_array_equal(
        read.view(ml_dtypes.bfloat16).reshape(2, 2, 4, 6), payload[[1, 0]], strict=True
    )


def test_a_copy_for_each_run(store):
    pages = [3, 4, 5, 9, 8, 1, 2]
    store.write(pages, payload_of(len(pages)))
    assert store.num_copies == 4
    store.read([1, 2, 3, 4, 5])
    assert store.num_copies == 5


def test_what_is_read_is_the_callers_own(store):
    before, after = payload_of(1, seed=1), payload_of(1, seed=2)
    store.write([0], before)
    read = store.read([0])
    store.write([0], after)
    np.testing.assert_array_equal(read, before)
    read[:] = 0
    np.testing.assert_array_equal(store.read([0]), after)


def test_no_pages_are_no_copies(store):
    store.write([], payload_of(1))
    assert store.read([]).shape == (0, PAGE_BYTES)
    assert store.num_copies == 0


@pytest.mark.parametrize("page", [-1, NUM_PAGES])
def test_a_page_outside_is_refused_and_nothing_changes(store, page):
    payload = payload_of(2)
    store.write([0], payload)
    with pytest.raises(IndexError, match=f"page {page} is not in 0 .. {NUM_PAGES - 1}"):
        store.write([0, page], payload[::-1].copy())
    with pytest.raises(IndexError):
        store.read([page])
    np.testing.assert_array_equal(store.read([0]), payload[:1])


@pytest.mark.parametrize(
    "payload",
    [
        np.zeros((2, PAGE_BYTES - 1), np.uint8),
        np.zeros((2, PAGE_BYTES), np.uint16),
        np.zeros((1, PAGE_BYTES), np.uint8),
        np.zeros((2, 2 * PAGE_BYTES), np.uint8)[:, ::2],
    ],
    ids=["narrow", "wide", "too few", "strided"],
)
def test_a_payload_that_does_not_fit_is_refused(store, payload):
    with pytest.raises(ValueError, match="at least 2 rows of 96 bytes"):
        store.write([0, 1], payload)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_budget_below_one_page_is_refused(kind, tmp_path):
    with pytest.raises(ConfigError, match=f"{kind} budget .* 0 pages; one page takes 96 bytes"):
        open_store(kind, tmp_path, num_pages=0)


@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("num_pages", [2**56, 2**70])
def test_a_budget_beyond_the_machine_is_refused(kind, tmp_path, num_pages):
    with pytest.raises(ConfigError, match=f"{kind} budget .* {num_pages * PAGE_BYTES} bytes"):
        open_store(kind, tmp_path, num_pages)
    assert not os.listdir(tmp_path)


def test_closed_once_or_twice(store):
    store.write([0], payload_of(1))
    store.close()
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.read([0])


def test_a_closed_or_refused_disk_store_leaves_no_descriptor_open(tmp_path):
    before = len(os.listdir("/dev/fd"))
    disk = DiskStore(tmp_path, NUM_PAGES, PAGE_BYTES)
    assert len(os.listdir("/dev/fd")) > before
    disk.close()
    with pytest.raises(ConfigError):
        DiskStore(tmp_path, 2**56, PAGE_BYTES)
    assert len(os.listdir("/dev/fd")) == before


def test_host_memory_is_page_aligned():
    with contextlib.closing(HostStore(NUM_PAGES, PAGE_BYTES)) as host:
        assert host._pages.ctypes.data % mmap.PAGESIZE == 0


def test_the_file_has_no_name_and_grows_as_written(tmp_path):
    page_bytes = 1 << 20
    with contextlib.closing(DiskStore(tmp_path, 64, page_bytes)) as disk:
        disk.write([40, 41], np.full((2, page_bytes), 7, np.uint8))
        os.fsync(disk._file.fileno())
        on_disk_bytes = os.fstat(disk._file.fileno()).st_blocks * 512
        assert 2 * page_bytes <= on_disk_bytes < 4 * page_bytes
        assert not os.listdir(tmp_path)


def test_a_page_never_written_holds_no_kv(disk):
    disk.write([3], payload_of(1))
    with pytest.raises(PageCorruptError, match="pages 2, 4 ") as caught:
        disk.read([2, 3, 4])
    assert caught.value.pages == (2, 4)


def test_a_changed_byte_is_noticed_until_the_page_is_written_again(disk):
    payload = payload_of(4)
    disk.write([4, 5, 6, 7], payload)
    changed = bytes([payload[2, 10] ^ 1])
    os.pwrite(disk._file.fileno(), changed, 6 * PAGE_BYTES + 10)
    for _ in range(2):
        with pytest.raises(PageCorruptError) as caught:
            disk.read([7, 6, 5, 4])
        assert caught.value.pages == (6,)
    np.testing.assert_array_equal(disk.read([4, 5, 7]), payload[[0, 1, 3]])
    disk.write([6], payload[:1])
    np.testing.assert_array_equal(disk.read([6]), payload[:1])


def test_a_disk_that_fills_in_the_middle_of_a_write():
    """The limit on a file's size, in a process of its own, does what a full disk does."""
    script = """
        import errno, resource, signal, tempfile
        import numpy as np
        from jaxserve.kv.offload.stores import DiskStore, PageCorruptError

        PAGE = 4096
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        payload = np.random.default_rng(0).integers(0, 256, (8, PAGE), np.uint8)
        with tempfile.TemporaryDirectory() as directory:
            disk = DiskStore(directory, 8, PAGE)
            disk.write([1, 2, 3, 4, 5, 6], payload)
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (5 * PAGE + 100, hard))
            try:
                disk.write([0, 3, 4, 5, 6], payload)
            except OSError as error:
                assert error.errno == errno.EFBIG, error
            else:
                raise AssertionError("the write did not fail")
            # Pages of the same write that did reach the disk count as lost, too.
            try:
                disk.read([0, 1, 2, 3, 4, 5, 6])
            except PageCorruptError as error:
                assert error.pages == (0, 3, 4, 5, 6), error
            else:
                raise AssertionError("a page half written was read")
            assert (disk.read([1, 2]) == payload[:2]).all()
            disk.write([3, 4], payload[4:])
            assert (disk.read([3, 4]) == payload[4:6]).all()
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            disk.write([5, 6], payload)
            assert (disk.read([5, 6]) == payload[:2]).all()
            disk.close()
    """
    run_script(script, timeout_s=PATIENCE_S)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"")
    sealed = tmp_path / "sealed"
    sealed.mkdir(mode=0o500)
    refused = [tmp_path / "missing", file, file / "below"]
    if os.geteuid():  # the root user may write anywhere
        refused.append(sealed)
    for directory in refused:
        with pytest.raises(ConfigError, match="name one that exists") as caught:
            DiskStore(directory, NUM_PAGES, PAGE_BYTES)
        assert repr(str(directory)) in str(caught.value)
