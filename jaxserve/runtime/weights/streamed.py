"""Layers that pass through a window of device memory, read by a thread ahead of the steps."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence

import jax

from jaxserve.core.settings.choices import WeightsOn
from jaxserve.core.steps.counters import WeightReads
from jaxserve.models.family import Params
from jaxserve.runtime.hardware.arrays import tree_bytes
from jaxserve.runtime.weights.placement import WINDOW
from jaxserve.runtime.weights.stores import LayerStore

SLOW_S = 10.0
"""A read that takes longer is logged, again and again."""
_CLOSE_S = 5.0

_log = logging.getLogger(__name__)


class StreamedWeights:
    """The window: at most `window` layers of `order` are in device memory at once.

    Steps take the layers in order, again and again, so the thread reads them in this order without
    being asked; the first layers of the next step follow the last ones of this. A slot of the
    window is read into again only when the layer in it is done.
    """

    def __init__(
        self,
        outside_layers: Params,
        staying: Mapping[int, Params],
        order: Sequence[int],
        store: LayerStore,
        tier: WeightsOn,
        window: int = WINDOW,
    ) -> None:
        """`staying` are the other layers, by number. A window of one layer reads nothing ahead."""
        self.outside_layers = outside_layers
        self.unread = False
        """Whether layers are taken as they are in the window, unread: for measurements of what
        steps compute meanwhile, after which nothing else may use these weights."""
        self.reads = WeightReads(tier)
        self._staying = staying
        self._order = order
        self._store = store
        self._free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        for slot in range(window):
            self._free.put(slot)
        self._read: queue.SimpleQueue[tuple[int, Params] | Exception] = queue.SimpleQueue()
        self._taken: list[tuple[int, Params]] = []
        self._failure: Exception | None = None
        self._begun_s: float | None = None
        self._closing = False
        self._kept_bytes = tree_bytes((outside_layers, dict(staying)))
        self._entered_bytes = self._left_bytes = 0
        self._thread = threading.Thread(target=self._run, name="jaxserve-weights", daemon=True)

    @property
    def device_bytes(self) -> int:
        """As WeightSource."""
        return self._kept_bytes + self._entered_bytes - self._left_bytes

    def take(self, layers: slice, x: jax.Array) -> list[Params]:
        """As WeightSource; at most a window of layers at once. Waits for `x` before streamed ones:
        until then the devices have work, and from then on they wait for the read."""
        if self._thread.ident is None:
            self._thread.start()
        numbers = range(layers.start, layers.stop)
        if all(number in self._staying for number in numbers):
            return [self._staying[number] for number in numbers]
        jax.block_until_ready(x)
        self._release()
        if self._begun_s is None:
            self._begun_s = time.perf_counter()
        return [self._staying.get(number) or self._next(number) for number in numbers]

    def end_step(self, x: jax.Array) -> None:
        """As WeightSource; waits for `x`."""
        jax.block_until_ready(x)
        self._release()
        self.reads.step_s += time.perf_counter() - self._begun_s
        self.reads.num_passes += 1
        self._begun_s = None

    def close(self) -> None:
        """End the thread, and free the window. A read that hangs is left behind."""
        self._closing = True
        self._free.put(None)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            return
        while not self._read.empty():
            read = self._read.get()
            if not isinstance(read, Exception):
                self._taken.append(read)
        self._release()
        self._store.close()

    def _release(self) -> None:
        """Frees the slots of the layers taken, which are done."""
        for slot, params in self._taken:
            self._left_bytes += tree_bytes(params)
            for array in jax.tree.leaves(params):
                array.delete()
            self._free.put(slot)
        self._taken.clear()

    def _next(self, layer: int) -> Params:
        if self._failure is not None:
            raise self._failure
        begin_s = time.perf_counter()
        read = self._wait(layer)
        self.reads.stall_s += time.perf_counter() - begin_s
        if isinstance(read, Exception):
            self._failure = read
            raise read
        self._taken.append(read)
        self.reads.num_bytes += sum(array.nbytes for array in jax.tree.leaves(read[1]))
        return read[1]

    def _wait(self, layer: int) -> tuple[int, Params] | Exception:
        for waited in itertools.count(1):
            try:
                return self._read.get(timeout=SLOW_S)
            except queue.Empty:
                _log.warning(
                    "the read of layer %d from %s has taken %g s so far; steps wait for it",
                    *(layer, self.reads.tier, waited * SLOW_S),
                )

    # In the thread

    def _run(self) -> None:
        for layer in itertools.cycle(self._order):
            slot = self._free.get()
            if slot is None or self._closing:
                return
            begin_s = time.perf_counter()
            try:
                load = self._store.load_unread if self.unread else self._store.load
                params = load(layer, slot)
            except Exception as error:
                self._read.put(error)
                return
            self.reads.read_s += time.perf_counter() - begin_s
            self._entered_bytes += tree_bytes(params)
            self._read.put((slot, params))
            del params
