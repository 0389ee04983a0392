"""Loading of keys and values from pages for Hopper's tensor cores.

They are loaded in tiles of as many positions as are attended to together, through a ring in shared
memory. A dedicated warpgroup, the loader, fills it; keys and values signal arrival and release
separately. Positions of a page are contiguous, so a tile of smaller pages is loaded in pieces.

Quantized pages (int8, float8) are first copied, still quantized, into a landing ring. The tensor
cores need both operands in one dtype, so the loader, otherwise idle between copies, converts landed
tiles to the queries' dtype, keys and values in turn. It converts as many tiles behind its copies as
the landing ring has slots, and refills each slot as soon as it has read it, without a barrier.

Scales of tokens stay apart from their elements: the readers multiply scores with those of keys, and
weights with those of values. A ring of their own has as many slots as the other two together. The
slot of a tile is refilled once the values of the tile that it had are multiplied, which the loader
has waited for by then.

Memory beyond a row's pages is undefined. Its weight is 0, but 0 times NaN is NaN: the loader, or
the warpgroup that multiplies them, overwrites values that are not visible with zeros.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import gpu as compat

DTYPES = ("bfloat16", "float16")
PACKED_DTYPES = ("int8", "float8_e4m3fn")
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)
_LARGEST_SCALE = 3e38


def unsupported(q: jax.Array, pages: Any) -> str | None:
    """Why pages of these shapes and dtypes cannot be loaded, None if they can.

    q [.., .., head_dim]; pages as `layout.KVPages`.
    """
    head_dim, page_size = pages.k.shape[2:]
    if q.dtype.name not in DTYPES:
        return f"queries are {q.dtype}; they can be {' or '.join(DTYPES)}."
    stored = (q.dtype.name, *PACKED_DTYPES)
    if pages.k.dtype != pages.v.dtype or pages.k.dtype.name not in stored:
        return (
            f"keys are {pages.k.dtype} and values {pages.v.dtype}; with queries of {q.dtype}, "
            f"both can be {', '.join(stored[:-1])} or {stored[-1]}."
        )
    if head_dim not in HEAD_DIMS:
        return f"head_dim is {head_dim}; it can be one of {HEAD_DIMS}."
    if page_size not in PAGE_SIZES:
        return f"page_size is {page_size}; it can be one of {PAGE_SIZES}."
    return None


def matrix(*shape: int, columns: int, dtype: Any) -> Any:
    """Shared memory in the layout of copies and tensor cores, tiles of up to `columns` columns."""
    row_bytes = min(columns * jnp.dtype(dtype).itemsize, 128)
    if row_bytes < 32:
        return plgpu.SMEM(shape, dtype)
    tiling = plgpu.TilingTransform((8, row_bytes // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(row_bytes)))


class Seen(NamedTuple):
    """Visible positions since <= position < until of a tile, counted from its first."""

    since: jax.Array
    until: jax.Array


class Places(NamedTuple):
    """References to a ring's memory and barriers.

    k [stages, pieces, head_dim, piece], v [stages, tile, head_dim]: tiles to multiply. `full`:
    ready to multiply, `free`: multiplied. landed: the landing ring of quantized tiles and its
    barriers. arrived: barrier of copies of values that must be blanked before they are full.
    scales: float32 [2 * scale_slots, pieces, piece], of keys and then of values, with a barrier
    for each.
    """

    k: Any
    v: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
    landed: Any = None
    arrived: Any = None
    scales: Any = None
    scales_full: Any = None


@dataclasses.dataclass(frozen=True)
class Ring:
    """A ring for each of `streams` streams of tiles, each with its own loader.

    num_pages, page_size, head_dim and stored: shape and dtype of the pages. dtype: of tiles. tile:
    positions per tile. stages: tiles of a stream that can be full. landings: quantized tiles in
    flight, 0 for unquantized pages. readers: warpgroups that multiply each tile. value_columns:
    contiguous features of values. blanks: whether the loader blanks positions that are not visible;
    with quantized pages this requires exactly one landing slot. scaled: whether tokens have scales.
    """

    num_pages: int
    page_size: int
    head_dim: int
    stored: Any
    dtype: Any
    tile: int
    stages: int
    landings: int
    value_columns: int
    streams: int = 1
    readers: int = 1
    blanks: bool = False
    scaled: bool = False

    @property
    def packed(self) -> bool:
        return self.stored != self.dtype

    @property
    def piece(self) -> int:
        """Positions of one copy, contiguous in a page."""
        return min(self.page_size, self.tile)

    @property
    def pieces(self) -> int:
        return self.tile // self.piece

    @property
    def scratch(self) -> Places:
        """Scratch types of a ring's references, for the kernel call."""
        tiles = self.streams * self.stages
        keys, values = (self.pieces, self.head_dim, self.piece), (self.tile, self.head_dim)

        def full():
            return plgpu.Barrier(num_barriers=tiles, num_arrivals=1 if self.packed else self.pieces)

        def free():
            return plgpu.Barrier(num_barriers=tiles, num_arrivals=self.readers)

        landed = arrived = None
        if self.packed:
            places = self.streams * self.landings
            landed = (
                matrix(places, *keys, columns=min(self.piece, 64), dtype=self.stored),
                matrix(places, *values, columns=64, dtype=self.stored),
                plgpu.Barrier(num_barriers=places, num_arrivals=self.pieces),
                plgpu.Barrier(num_barriers=places, num_arrivals=self.pieces),
            )
        elif self.blanks:
            arrived = plgpu.Barrier(num_arrivals=self.pieces)
        scales = scales_full = None
        if self.scaled:
            places = 2 * self.streams * self.scale_slots
            scales = plgpu.SMEM((places, self.pieces, self.piece), jnp.float32)
            scales_full = plgpu.Barrier(num_barriers=places, num_arrivals=self.pieces)
        return Places(
            matrix(tiles, *keys, columns=self.piece, dtype=self.dtype),
            matrix(tiles, *values, columns=self.value_columns, dtype=self.dtype),
            full(),
            full(),
            free(),
            free(),
            landed,
            arrived,
            scales,
            scales_full,
        )

    @property
    def scale_slots(self) -> int:
        """Of each stream."""
        return self.stages + self.landings

    @property
    def scale_bytes(self) -> int:
        """Of all streams."""
        return self.streams * self.scale_slots * 2 * self.tile * 4 if self.scaled else 0

    def slot(self, number: jax.Array, stream: jax.Array | int = 0) -> jax.Array:
        """Slot of tile `number` of a stream, counted from its first tile."""
        return stream * self.stages + _place(number, self.stages)

    def scale_slot(self, number: jax.Array, stream: jax.Array | int = 0) -> jax.Array:
        """Slot of the scales of the keys of tile `number` of a stream; those of its values are in
        the next."""
        return 2 * (stream * self.scale_slots + lax.rem(number, self.scale_slots))

    def scales(self, places: Places, slot: jax.Array, rows: int, interpret: Any) -> list[jax.Array]:
        """Of each piece, when they have arrived: factors [rows, positions] of scores or weights. 0
        where a scale is none of a token's: the weight is 0, but undefined memory may be anything.
        """
        plgpu.barrier_wait(places.scales_full.at[slot])

        def of_piece(n: int) -> jax.Array:
            layout = plgpu.Layout.WGMMA.reduce(0)
            scales = compat.in_layout(places.scales[slot, n], layout, interpret)
            scales = jnp.where((scales >= 0) & (scales < _LARGEST_SCALE), scales, 0)
            return lax.broadcast_in_dim(scales, (rows, self.piece), (1,))

        return [of_piece(n) for n in range(self.pieces)]

    def free_all(self, places: Places, stream: jax.Array | int = 0) -> None:
        """Every reader must call this first."""
        for stage in range(self.stages):
            plgpu.barrier_arrive(places.k_free.at[stream * self.stages + stage])
            plgpu.barrier_arrive(places.v_free.at[stream * self.stages + stage])


def _place(number, places):
    # The compiler must not know that a single slot is number 0: it would keep the tensor cores'
    # operand descriptors in registers, and spill.
    return lax.rem(number, places) if places > 1 else lax.shift_right_logical(number, 30)


@dataclasses.dataclass(frozen=True)
class Loader:
    """The loader of a stream. k, v, tables, scales: references to device memory."""

    ring: Ring
    places: Places
    k: Any
    v: Any
    tables: Any
    interpret: Any
    stream: Any = 0
    scales: Any = None

    def load(
        self,
        number: Any,
        row: Any,
        head: Any,
        start: Any,
        seen: Seen,
        landed: Seen | None = None,
    ) -> None:
        """Load tile `number` of the stream: a KV head of a row, from position `start` on.

        landed: visible range of the previous tile, if quantized tiles are blanked. Beyond the last
        visible page, that page is loaded again and masked.
        """
        ring, places = self.ring, self.places
        offset = pl.multiple_of(lax.rem(start, ring.page_size), ring.piece)
        # Read before waiting, so that their latency is not added to the wait.
        first, last = (lax.div(n, ring.page_size) for n in (start, start + seen.until - 1))
        ids = [self.tables[row, jnp.minimum(first + n, last)] for n in range(ring.pieces)]
        ids = [jnp.clip(page, 0, ring.num_pages - 1) for page in ids]

        def copy_keys(tile, barrier):
            for n, page in enumerate(ids):
                source = self.k.at[page, head, :, pl.ds(offset, ring.piece)]
                plgpu.copy_gmem_to_smem(source, tile.at[n], barrier)

        def copy_values(tile, barrier):
            for n, page in enumerate(ids):
                source = self.v.at[page, head, pl.ds(offset, ring.piece)]
                target = tile.at[pl.ds(n * ring.piece, ring.piece)]
                plgpu.copy_gmem_to_smem(source, target, barrier)

        if ring.packed:
            k_land, v_land, k_landed, v_landed = places.landed
            slot = self._landing(number)
            before = number - ring.landings
            pl.when(before >= 0)(lambda: self._unpack_keys(before))
            copy_keys(k_land.at[slot], k_landed.at[slot])
            pl.when(before >= 0)(lambda: self._unpack_values(before, landed))
            copy_values(v_land.at[slot], v_landed.at[slot])
            if ring.scaled:
                slot = ring.scale_slot(number, self.stream)
                for values in range(2):
                    barrier = places.scales_full.at[slot + values]
                    for n, page in enumerate(ids):
                        source = self.scales.at[page, head, values, pl.ds(offset, ring.piece)]
                        target = places.scales.at[slot + values, n]
                        plgpu.copy_gmem_to_smem(source, target, barrier)
            return
        slot = ring.slot(number, self.stream)
        plgpu.barrier_wait(places.k_free.at[slot])
        copy_keys(places.k.at[slot], places.k_full.at[slot])
        plgpu.barrier_wait(places.v_free.at[slot])
        if not ring.blanks:
            copy_values(places.v.at[slot], places.v_full.at[slot])
            return

        whole = self._is_whole(seen)

        @pl.when(whole)
        def _():
            copy_values(places.v.at[slot], places.v_full.at[slot])

        @pl.when(jnp.logical_not(whole))
        def _():
            copy_values(places.v.at[slot], places.arrived)
            plgpu.barrier_wait(places.arrived)
            blank(places.v.at[slot], seen, self.interpret)
            for _ in range(ring.pieces):
                plgpu.barrier_arrive(places.v_full.at[slot])

    def finish(self, tiles: Any, landed: Seen | None = None) -> None:
        """Call after the last of `tiles`; returns when all loaded tiles have been multiplied."""
        ring, places = self.ring, self.places
        if ring.packed:

            def unpack(tile, _):
                self._unpack_keys(tile)
                self._unpack_values(tile, landed)

            lax.fori_loop(jnp.maximum(tiles - ring.landings, 0), tiles, unpack, None)
        for stage in range(ring.stages):
            plgpu.barrier_wait(places.k_free.at[self.stream * ring.stages + stage])
            plgpu.barrier_wait(places.v_free.at[self.stream * ring.stages + stage])

    def _landing(self, number):
        return self.stream * self.ring.landings + _place(number, self.ring.landings)

    def _is_whole(self, seen):
        return (seen.since <= 0) & (seen.until >= self.ring.tile)

    def _unpack_keys(self, number):
        k_land, _, k_landed, _ = self.places.landed
        source, target = self._landing(number), self.ring.slot(number, self.stream)
        plgpu.barrier_wait(k_landed.at[source])
        plgpu.barrier_wait(self.places.k_free.at[target])

        def widen_piece(n, _):
            self._widen(k_land.at[source, n], self.places.k.at[target, n])

        lax.fori_loop(0, self.ring.pieces, widen_piece, None)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.places.k_full.at[target])

    def _unpack_values(self, number, seen):
        _, v_land, _, v_landed = self.places.landed
        source, target = self._landing(number), self.ring.slot(number, self.stream)
        plgpu.barrier_wait(v_landed.at[source])
        plgpu.barrier_wait(self.places.v_free.at[target])
        self._widen(v_land.at[source], self.places.v.at[target])
        plgpu.commit_smem()
        if self.ring.blanks:

            @pl.when(jnp.logical_not(self._is_whole(seen)))
            def _():
                blank(self.places.v.at[target], seen, self.interpret)

        plgpu.barrier_arrive(self.places.v_full.at[target])

    def _widen(self, source, target):
        rows, columns = source.shape
        width = min(64, columns)
        across = columns // width

        def widen_part(n, _):
            row = pl.multiple_of(lax.div(n, across) * 64, 64)
            column = pl.multiple_of(lax.rem(n, across) * width, width)
            part = pl.ds(row, 64), pl.ds(column, width)
            layout = plgpu.Layout.WGMMA_UPCAST_2X
            value = compat.in_layout(source[part], layout, self.interpret)
            target[part] = _widened(value, target.dtype)

        lax.fori_loop(0, rows // 64 * across, widen_part, None)


def blank(values: Any, seen: Seen, interpret: Any) -> None:
    """Zero positions of a tile of values, a reference [tile, head_dim], that are not visible."""
    rows, columns = (size // 64 for size in values.shape)

    def blank_part(part, _):
        row = pl.multiple_of(lax.div(part, columns) * 64, 64)
        column = pl.multiple_of(lax.rem(part, columns) * 64, 64)
        position = compat.positions((64, 64), 0, plgpu.Layout.WGMMA, interpret)
        position += row
        visible = (position >= seen.since) & (position < seen.until)
        own = values.at[pl.ds(row, 64), pl.ds(column, 64)]
        value = compat.in_layout(own[...], plgpu.Layout.WGMMA, interpret)
        own[...] = jnp.where(visible, value, jnp.zeros_like(value))

    lax.fori_loop(0, rows * columns, blank_part, None)
    plgpu.commit_smem()


def _widened(values, dtype):
    """int8 or float8 as `dtype`, exactly.

    The hardware converts pairs of float8 to float16, and the compiler has a short conversion from
    int8 to bfloat16. The other half precision is reached from there through float32.
    """
    first = jnp.bfloat16 if values.dtype == jnp.int8 else jnp.float16
    values = values.astype(first)
    return values if dtype == first else values.astype(jnp.float32).astype(dtype)
