"""The window of streamed weights: what is in it, in what order, and what a failing disk does."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S

from jaxserve.core.errors import ConfigError, WeightsError
from jaxserve.runtime.weights import streamed
from jaxserve.runtime.weights.layer_layout import LayerLayout
from jaxserve.runtime.weights.placement import WINDOW, place
from jaxserve.runtime.weights.stores import HostLayerStore, LayerFile
from jaxserve.runtime.weights.streamed import StreamedWeights

X = np.zeros(1, np.float32)


def layer(number: int) -> dict[str, jax.Array]:
    """Parameters of the dtypes that weights have, some of odd sizes."""
    return {
        "norm": jnp.full(7, number, jnp.bfloat16),
        "codes": jnp.full((5, 3), number, jnp.int8),
        "scales": jnp.full((5, 1), number, jnp.float16),
        "weight": jnp.full((9, 33), number, jnp.float32),
    }


def shapes(params):
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), params
    )


def layouts(count: int) -> list[LayerLayout]:
    return [LayerLayout(shapes(layer(number))) for number in range(count)]


def is_layer(params, number: int) -> bool:
    return all(
        jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), params, layer(number)))
    )


@pytest.fixture
def file(tmp_path):
    written = LayerFile(tmp_path / "model.layers", layouts(4))
    written.write(layer(number) for number in range(4))
    return written


@pytest.fixture
def weights(file):
    """Four layers, all of which are streamed."""
    made = StreamedWeights({}, {}, range(4), file.open(WINDOW), "disk")
    yield made
    made.close()
    assert not made._thread.is_alive()


def run_step(weights, count: int = 4) -> None:
    for number in range(count):
        (params,) = weights.take(slice(number, number + 1), X)
        assert is_layer(params, number)
    weights.end_step(X)


# Placement


@settings(max_examples=200)
@given(
    outside=st.integers(0, 1000),
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    budget=st.one_of(st.none(), st.integers(1, 4000)),
)
def test_a_placement_keeps_to_its_budget(outside, sizes, budget):
    least = outside + min(WINDOW, len(sizes)) * max(sizes)
    if budget is not None and budget < least and len(sizes) > WINDOW:
        with pytest.raises(ConfigError, match=f"resident_weight_bytes is {budget}.*least {least}"):
            place("disk", outside, sizes, budget)
        return
    placement = place("disk", outside, sizes, budget)
    staying = len(sizes) - len(placement.streamed)
    assert sorted(set(placement.streamed)) == list(placement.streamed)
    if len(sizes) <= WINDOW:
        assert staying == len(sizes)
    elif budget is None:
        assert staying == 0 and placement.device_bytes == least
    else:
        assert placement.device_bytes <= budget
        # Another layer of the largest size would not fit.
        room = budget - outside - WINDOW * max(sizes)
        assert staying == len(sizes) or staying == room // max(sizes)
    if 0 < staying < len(sizes):  # No two runs of streamed layers differ by more than one.
        gaps = np.diff([-1, *sorted({*range(len(sizes))} - {*placement.streamed}), len(sizes)])
        assert gaps[:-1].max() - gaps[:-1].min() <= 1


def test_weights_on_the_device_stay_there():
    placement = place("device", 10, [5, 5, 5], None)
    assert placement.streamed == () and placement.device_bytes == placement.model_bytes == 25


# Layouts and stores


def test_a_layer_comes_back_as_it_was():
    layout = LayerLayout(shapes(layer(3)))
    buffer = np.zeros(layout.num_bytes, np.uint8)
    layout.pack(layer(3), buffer)
    params = layout.unpack(buffer)
    assert is_layer(params, 3)
    assert params["norm"].dtype == ml_dtypes.bfloat16


def test_a_file_is_complete_or_absent(tmp_path):
    """Also where writing stops in the middle."""
    unfinished = LayerFile(tmp_path / "weights" / "model.layers", layouts(3))

    def layers():
        yield layer(0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        unfinished.write(layers())
    assert not unfinished.complete
    assert list(unfinished.path.parent.iterdir()) == []
    unfinished.write(map(layer, range(3)))
    assert unfinished.complete
    os.truncate(unfinished.path, 100)
    assert not unfinished.complete


def test_a_disk_without_room(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))
    file = LayerFile.of("a model", layouts(3))
    file.check_room()
    nearly = os.statvfs_result((1, 1, 9, 9, 9, *[0] * 5))
    monkeypatch.setattr(os, "statvfs", lambda path: nearly)
    with pytest.raises(ConfigError, match=r"weights_on is 'disk'.*\d+ left; set JAXSERVE_CACHE"):
        file.check_room()
    file.write(map(layer, range(3)))
    file.check_room()  # It is there already.


def test_what_a_killed_process_was_writing_is_deleted(tmp_path, monkeypatch):
    """And not what others write meanwhile, who have locked it."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))
    file, other = (LayerFile.of(name, layouts(2)) for name in ("a model", "another"))

    def layers():
        yield layer(0)
        (tmp_path / "weights" / "killed.unfinished").write_bytes(b"half")
        file.check_room()
        assert len([*file.path.parent.iterdir()]) == 1
        yield layer(1)

    other.write(layers())
    assert other.complete
    assert [*file.path.parent.iterdir()] == [other.path]


def test_a_file_that_cannot_be_written(tmp_path):
    (tmp_path / "weights").write_text("not a directory")
    with pytest.raises(WeightsError, match=r"cannot be written \(.*\); set JAXSERVE_CACHE"):
        LayerFile(tmp_path / "weights" / "model.layers", layouts(1)).write([layer(0)])


def test_a_host_without_memory():
    here = layer(0)["codes"].sharding
    endless = LayerLayout({"codes": jax.ShapeDtypeStruct((1 << 60,), jnp.int8, sharding=here)})
    with pytest.raises(WeightsError, match=r"host has no memory for layer 0 .*; set weights_on to"):
        HostLayerStore([endless]).put(0, {})


def test_reads_that_return_less(file, monkeypatch):
    """A read may return fewer bytes than it was asked for; the rest is then read."""
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:100]], at))
    store = file.open(WINDOW)
    assert all(is_layer(store.load(number, 0), number) for number in (0, 3, 1))
    store.close()


# The window


class Counted:
    """A store that counts the layers in memory, as the arrays that it made show."""

    def __init__(self, store):
        self._store, self.most, self._made = store, 0, []

    def load(self, layer, slot):
        params = self._store.load(layer, slot)
        self._made.append(params["weight"])
        self.most = max(self.most, sum(not made.is_deleted() for made in self._made))
        return params

    def close(self):
        self._store.close()


@settings(max_examples=25)
@given(
    count=st.integers(1, 7),
    window=st.integers(1, 4),
    staying=st.sets(st.integers(0, 6)),
    steps=st.integers(1, 4),
    on_disk=st.booleans(),
)
def test_every_step_gets_every_layer_from_a_window(
    tmp_path_factory, count, window, staying, steps, on_disk
):
    """Whatever stays, in whatever window; no more than the window is ever in memory."""
    staying = {number: layer(number) for number in staying if number < count - 1}
    order = [number for number in range(count) if number not in staying]
    if on_disk:
        file = LayerFile(tmp_path_factory.mktemp("layers") / "m.layers", layouts(count))
        file.write(map(layer, range(count)))
        store = Counted(file.open(window))
    else:
        host = HostLayerStore(layouts(count))
        for number in order:
            host.put(number, layer(number))
        store = Counted(host)
    weights = StreamedWeights({}, staying, order, store, "disk", window)
    for _ in range(steps):
        run_step(weights, count)
    assert weights.reads.num_passes == steps
    of_layer = sum(array.nbytes for array in jax.tree.leaves(layer(0)))
    assert weights.reads.num_bytes >= steps * len(order) * of_layer
    weights.close()
    assert weights.reads.num_bytes <= (steps * len(order) + window) * of_layer
    assert store.most <= window
    assert not weights._thread.is_alive()


def test_a_layer_is_kept_until_it_is_done(weights):
    """Its slot is read into only after what comes out of it is ready."""
    (first,) = weights.take(slice(0, 1), X)
    (second,) = weights.take(slice(1, 2), X)
    assert first["weight"].is_deleted() and not second["weight"].is_deleted()
    time.sleep(0.05)  # The thread may now read layer 2, and not layer 3.
    assert is_layer(second, 1)
    weights.take(slice(2, 3), X)
    weights.take(slice(3, 4), X)
    weights.end_step(X)


def test_waiting_for_a_read_is_a_stall(file, monkeypatch):
    """A slow disk is counted, and logged while a step waits for it."""
    preadv = os.preadv

    def slow(*args):
        time.sleep(0.2)
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", slow)
    weights = StreamedWeights({}, {}, range(4), file.open(WINDOW), "disk")
    run_step(weights)
    weights.close()
    assert 0.15 < weights.reads.stall_s <= weights.reads.step_s
    assert 0.5 < weights.reads.stall_share <= 1


def test_measurements_take_layers_unread(weights, monkeypatch):
    """After those that the window has already; each has its own shapes."""

    def failing(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    run_step(weights)
    weights.unread = True
    for _ in range(3):
        for number in range(4):
            (params,) = weights.take(slice(number, number + 1), X)
            assert shapes(params) == shapes(layer(number))
        weights.end_step(X)
        monkeypatch.setattr(os, "preadv", failing)


def test_a_read_that_hangs_is_logged(file, monkeypatch, caplog):
    preadv, go_on = os.preadv, threading.Event()

    def hanging(*args):
        go_on.wait(PATIENCE_S)
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", hanging)
    monkeypatch.setattr(streamed, "SLOW_S", 0.02)
    weights = StreamedWeights({}, {}, range(4), file.open(WINDOW), "disk")
    threading.Timer(0.1, go_on.set).start()
    with caplog.at_level("WARNING"):
        run_step(weights)
    weights.close()
    assert "the read of layer 0 from disk has taken 0.02 s so far" in caplog.text


def test_a_read_that_fails_is_a_typed_error(weights, monkeypatch):
    run_step(weights)

    def failing(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", failing)
    for _ in range(2):  # And so are all steps after it.
        with pytest.raises(WeightsError, match=r"layer \d cannot be read .*Input/output error"):
            for _ in range(2):
                run_step(weights)


def test_a_file_that_is_cut_is_a_typed_error(weights, file):
    """A memory map of it would end the process with SIGBUS instead."""
    os.truncate(file.path, file.num_bytes // 2)
    with pytest.raises(WeightsError, match=r"ends at byte \d+\); check the disk, delete"):
        for _ in range(3):
            run_step(weights)


def test_nothing_is_left_when_it_is_closed(file):
    before = set(threading.enumerate())
    weights = StreamedWeights({}, {}, range(4), file.open(WINDOW), "disk")
    run_step(weights)
    weights.close()
    weights.close()
    del weights
    gc.collect()
    assert not set(threading.enumerate()) - before
