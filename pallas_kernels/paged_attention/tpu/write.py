"""KV writes on TPUs: tiles of the pool are read, merged with new tokens and written back.

A token's key is one lane of its page, [head_dim, page_size], and no copy can write less than 128
lanes. So the work list consists of runs: consecutive tokens with consecutive slots within 128
positions of one page. A decode is a run of one token, a chunk has one run for each 128 positions it
touches. A program reads the tile of keys [kv_heads, head_dim, 128] of a run into VMEM, a slot of a
ring, replaces the run's lanes and copies the tile back. Values are rows of their page: only the
groups of 32 rows that the run touches are read and written. While a run is merged, half of the ring
is being read and the other half written, across all runs of the batch.

New tokens are loaded in blocks of 128, each with the next block and the runs that begin in it: a
mask combines what a run needs of both blocks, and a rotation aligns it. This works on words of 32
bits, which hold neighbouring rows of smaller elements, so that all dtypes are handled alike and
nothing is rounded. In keys, rows are features, and tokens stay whole. In values, rows are tokens,
which a rotation moves by whole words only. Values are therefore passed once for each row of a word
that a token can have, each time shifted down by one row.

Writes to page 0 are dropped, since nothing reads it: padding costs nothing. No tile is read before
earlier writes to it have completed: a run that shares its tile with another one in the ring waits
until the ring is empty. That is slow, and does not happen if each sequence's tokens are consecutive
and no two sequences write to the same page.

Arithmetic behind the sizes (not measurements), for 8 KV heads of head_dim 128 in bfloat16:

- A tile of keys is 256 KiB, a decode's group of values 64 KiB. Reading and writing both are 640 KiB
  per decode, 0.4 us at the 1.64 TB/s of v6e: 64 decodes take 26 us per layer, the time in which
  attention reads 160 positions of each.
- A chunk of 1024 tokens reads and writes 4 to 4.5 MiB each, 6 us.
- A slot is 512 KiB, so the ring of 4 MiB has eight: up to 1 MiB of keys in flight in either
  direction, which hides 1 us of memory latency on v6e.
- VMEM: the ring 4 MiB, the blocks of new tokens 3 MiB; of int8 with 16 heads, 5 MiB.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.arrays import as_bits
from pallas_kernels.compat import tpu as compat
from pallas_kernels.paged_attention.layout import KVPages

DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn")
HEAD_DIMS = (64, 128, 256)
LANES = 128
"""Elements along the last dimension of a tile, and positions that are read and written together."""

MAX_TOKENS = 16 * 1024
"""Maximum per call: the work list takes 20 bytes of scalar memory (SMEM, 1 MiB) per token."""

ROWS = 32
"""Rows of values that are copied together, a whole tile of any dtype."""

TILE_BYTES = 512 * 1024
"""Maximum bytes of a tile of keys of a program's KV heads, unless one head alone has more."""

RING_BYTES, MIN_SLOTS, MAX_SLOTS = 4 * 2**20, 4, 16

_VMEM_BYTES = 32 * 2**20


class Runs(NamedTuple):
    """Tokens with consecutive slots within a tile, int32 [tokens] each; most are absent.

    token, length: the run's tokens are token <= t < token + length. page, offset: slot of the first
    of them. waits: 1 if one of the `depth - 1` previous runs has the same tile.
    """

    token: jax.Array
    length: jax.Array
    page: jax.Array
    offset: jax.Array
    waits: jax.Array


def find_runs(
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    num_pages: int,
    page_size: int,
    span: int,
    depth: int,
) -> tuple[Runs, jax.Array]:
    """The runs of tokens written to pages 0 < page < num_pages, in order, then absent ones.

    page_ids, offsets: int32 [tokens]. span: positions of a tile. Absent runs have no tokens.

    Also returns the cumulative number of runs that begin in each `span` of tokens, int32 [blocks].
    """
    tokens = len(page_ids)
    index = jnp.arange(tokens, dtype=jnp.int32)
    real = (page_ids > 0) & (page_ids < num_pages) & (offsets >= 0) & (offsets < page_size)
    tile = jnp.where(real, page_ids * (page_size // span) + lax.div(offsets, span), -1)
    follows = (tile[1:] == tile[:-1]) & (offsets[1:] == offsets[:-1] + 1)
    begins = real & ~jnp.pad(follows, (1, 0))
    ends = real & ~jnp.pad(follows, (0, 1))
    begins, ends = jnp.sort(
        jnp.stack([jnp.where(begins, index, tokens), jnp.where(ends, index + 1, tokens)])
    )
    first = jnp.minimum(begins, tokens - 1)
    tile = tile[first]
    padded = jnp.pad(tile, (depth - 1, 0), constant_values=-1)
    earlier = (padded[back : back + tokens] for back in range(depth - 1))
    waits = sum((tile == other for other in earlier), jnp.zeros(tokens, bool))
    runs = Runs(begins, ends - begins, page_ids[first], offsets[first], waits.astype(jnp.int32))
    limits = jnp.minimum(jnp.arange(span, tokens + span, span, dtype=jnp.int32), tokens)
    return runs, jnp.sum(begins < limits[:, None], axis=1, dtype=jnp.int32)


def unsupported(
    pages: KVPages,
    k: jax.Array,
    v: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    interpret: Any = None,
) -> str | None:
    """Why `write_kv` refuses arrays of these shapes and dtypes, None if it does not."""
    head_dim, page_size = pages.k.shape[2:]
    for name, array, new in (("keys", pages.k, k), ("values", pages.v, v)):
        if array.dtype.name not in DTYPES and not interpret:
            return f"{name} are {array.dtype}; they can be of {', '.join(DTYPES)}."
        if new.dtype != array.dtype:
            return f"new {name} are {new.dtype}; they must be {array.dtype}, as the pages are."
        per_word = _per_word(array)
        if interpret and (head_dim % per_word or page_size % per_word):
            return (
                f"pages have {page_size} tokens and head_dim {head_dim}; "
                f"interpreted, {array.dtype} needs multiples of {per_word}."
            )
    if len(page_ids) > MAX_TOKENS:
        return f"there are {len(page_ids)} tokens; there can be up to {MAX_TOKENS}."
    if interpret:
        return None
    if head_dim not in HEAD_DIMS:
        return f"head_dim is {head_dim}; it can be one of {HEAD_DIMS}."
    if page_size % LANES:
        return f"page_size is {page_size}; it can be a multiple of {LANES}."
    return None


def write_kv(
    pages: KVPages,
    k: jax.Array,
    v: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    interpret: Any = None,
) -> KVPages:
    """`xla.write_kv`, except that page 0 is not written; in place when the pages are donated.

    interpret: None on TPUs. Elsewhere True, which compiles to XLA, or what
        `compat.tpu_interpreter` gives.

    Raises ValueError for what `unsupported` names.
    """
    reason = unsupported(pages, k, v, page_ids, offsets, interpret=interpret)
    if reason is not None:
        raise ValueError(reason)
    num_pages, kv_heads, dim, page_size = pages.k.shape
    dtypes = pages.k.dtype, pages.v.dtype
    if interpret:  # XLA on the host would convert some dtypes, and round
        pages, k, v = jax.tree.map(as_bits, (pages, k, v))
    # As in `kernel`: values of a small head_dim are stored like keys.
    turned = dim < LANES
    pool = pages.k, pages.v.swapaxes(2, 3) if turned else pages.v
    span = math.gcd(page_size, LANES)
    arrays = [_Array(array, span, by_rows) for array, by_rows in zip(pool, (False, not turned))]
    heads, slots = _sizes(arrays, kv_heads)
    runs, until = find_runs(
        page_ids, offsets, num_pages=num_pages, page_size=page_size, span=span, depth=slots
    )
    written = _write(
        arrays, [array.source(new) for array, new in zip(arrays, (k, v))], runs, until,
        heads=heads, slots=slots, interpret=interpret,
    )  # fmt: skip
    keys, values = map(lax.bitcast_convert_type, written, dtypes) if interpret else written
    return KVPages(keys, values.swapaxes(2, 3) if turned else values)


class _Array:
    """Keys or values of the pool, [pages, kv_heads, rows, columns], and their token layout.

    by_rows: a token is a row, and a word has `per_word` rows; otherwise it is a whole column.
    """

    def __init__(self, pool, span, by_rows):
        self.pool, self.span, self.by_rows = pool, span, by_rows
        self.per_word = _per_word(pool) if by_rows else 1
        self.tile = (span, pool.shape[3]) if by_rows else (pool.shape[2], span)
        self.group = math.gcd(span, ROWS) if by_rows else span
        """Positions that are copied together."""

    def source(self, new):
        """New elements [per_word, kv_heads, *]; in the n-th, tokens are shifted down by n rows.

        An extra block at the end holds the rows that are shifted out of the last one.
        """
        new = new.swapaxes(0, 1)
        padding = self.span + -new.shape[1] % self.span
        if not self.by_rows:
            return jnp.pad(new.swapaxes(1, 2), ((0, 0), (0, 0), (0, padding)))[None]
        down = range(self.per_word)
        return jnp.stack([jnp.pad(new, ((0, 0), (n, padding - n), (0, 0))) for n in down])

    def source_spec(self, heads, after):
        """BlockSpec of a program's block of new tokens, or of the next one if `after` is 1."""

        def place(group, block, *_):
            return (0, group, block + after, 0) if self.by_rows else (0, group, 0, block + after)

        return pl.BlockSpec((self.per_word, heads, *self.tile), place)

    def copies(self, pool, slot, page, heads, offset, length):
        """For each group of a tile: whether the run touches it, its parts of pool and slot."""
        first = offset & (self.span - 1)
        for begin in range(0, self.span, self.group):
            group = pl.ds(pl.multiple_of(offset - first + begin, self.group), self.group)
            touched = (first < begin + self.group) & (first + length > begin)
            if self.by_rows:
                yield touched, pool.at[page, heads, group], slot.at[:, pl.ds(begin, self.group)]
            else:
                yield touched, pool.at[page, heads, :, group], slot

    def merge(self, slot, here, after, token, offset, length):
        """Merge new elements into the tile in `slot`: `length` tokens from `token` of `here` on."""
        axis = 0 if self.by_rows else 1
        words = self.span // self.per_word
        shape = (words, self.tile[1]) if self.by_rows else (self.tile[0] // _per_word(slot), words)
        index = lax.broadcasted_iota(jnp.int32, shape, axis)
        offset &= self.span - 1
        down = (offset - token) & (self.per_word - 1)
        begin = lax.div(token + down, self.per_word)
        shift = (lax.div(offset, self.per_word) - begin) & (words - 1)
        bits = 32 // self.per_word
        new = jnp.zeros(shape, jnp.uint32)
        for part in range(self.per_word):
            position = index * self.per_word + part
            mask = ((1 << bits) - 1) << (part * bits)
            inside = (position >= offset) & (position < offset + length)
            new |= jnp.where(inside, jnp.uint32(mask), jnp.uint32(0))

        def merge_head(head, _):
            first, second = _words(here[down, head]), _words(after[down, head])
            moved = pltpu.roll(jnp.where(index >= begin, first, second), shift, axis)
            merged = (moved & new) | (_words(slot[head]) & ~new)
            slot[head] = pltpu.bitcast(merged, slot.dtype)

        lax.fori_loop(0, slot.shape[0], merge_head, None)


def _sizes(arrays, kv_heads):
    """KV heads per program, which a core processes in turn, and slots of its ring."""
    cores = compat.tpu_cores()
    share = kv_heads // cores if kv_heads % cores == 0 else kv_heads
    head_bytes = [math.prod(array.tile) * array.pool.dtype.itemsize for array in arrays]
    most = max(1, TILE_BYTES // max(head_bytes))
    heads = max(n for n in range(1, share + 1) if share % n == 0 and n <= most)
    slots = RING_BYTES // (heads * sum(head_bytes))
    return heads, min(max(slots, MIN_SLOTS), MAX_SLOTS)


def _write(arrays, sources, runs, until, *, heads, slots, interpret):
    """Call the kernel: the pool's arrays with the runs written to them."""
    tokens, blocks = len(runs.token), len(until)
    span, kv_heads = arrays[0].span, arrays[0].pool.shape[1]
    ahead = slots // 2
    # One array, because each array is a copy to wait for. Its parts begin at multiples of a tile.
    stride = -(-tokens // LANES) * LANES
    fields = (jnp.pad(field, (0, stride - tokens)) for field in runs)
    work = jnp.concatenate([*fields, jnp.pad(until, (0, -blocks % LANES))])

    def kernel(
        work, k_here, k_next, v_here, v_next, _, __, k, v, k_ring, v_ring, arrived, left, cursors
    ):
        *runs, until = (
            work.at[pl.ds(begin, min(stride, work.shape[0] - begin))]
            for begin in range(0, work.shape[0], stride)
        )
        runs = Runs(*runs)
        block, own_heads = pl.program_id(1), pl.ds(pl.program_id(0) * heads, heads)
        total = until[blocks - 1]
        parts = (
            (arrays[0], k, k_ring, k_here, k_next),
            (arrays[1], v, v_ring, v_here, v_next),
        )

        def for_each_copy(run, act, *, out):
            slot = lax.rem(run, slots)
            where = runs.page[run], own_heads, runs.offset[run], runs.length[run]
            for array, pool, ring, *_ in parts:
                for touched, outside, inside in array.copies(pool, ring.at[slot], *where):
                    ends = (inside, outside) if out else (outside, inside)
                    copy = pltpu.make_async_copy(*ends, (left if out else arrived).at[slot])
                    pl.when(touched)(lambda copy=copy: act(copy))

        def settle(begin, end):
            """Wait until runs begin <= run < end are written."""

            def wait(run, _):
                for_each_copy(run, lambda copy: copy.wait(), out=True)

            lax.fori_loop(begin, end, wait, None)
            return jnp.maximum(begin, end)

        def step(run, state):
            def read(other, state):
                next_read, settled = state
                waits = runs.waits[other] > 0
                may = (other == next_read) & ((other == run) | ~waits)
                settled = settle(
                    settled, jnp.where(may, jnp.where(waits, other, other - slots + 1), settled)
                )

                @pl.when(may)
                def _():
                    for_each_copy(other, lambda copy: copy.start(), out=False)

                return next_read + may.astype(jnp.int32), settled

            state = lax.fori_loop(state[0], jnp.minimum(run + ahead + 1, total), read, state)
            for_each_copy(run, lambda copy: copy.wait(), out=False)
            token = runs.token[run] - block * span
            for array, _, ring, here, after in parts:
                slot = ring.at[lax.rem(run, slots)]
                array.merge(slot, here, after, token, runs.offset[run], runs.length[run])
            for_each_copy(run, lambda copy: copy.start(), out=True)
            return state

        @pl.when(block == 0)
        def _():
            cursors[0] = cursors[1] = 0

        begin = jnp.where(block > 0, until[jnp.maximum(block - 1, 0)], 0)
        state = lax.fori_loop(begin, until[block], step, (cursors[0], cursors[1]))
        cursors[0], cursors[1] = state

        @pl.when(block == blocks - 1)
        def _():
            settle(cursors[1], total)

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    pool = [array.pool for array in arrays]
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(kv_heads // heads, blocks),
            in_specs=[
                *(array.source_spec(heads, after) for array in arrays for after in (0, 1)),
                *[anywhere] * 2,
            ],
            out_specs=[anywhere] * 2,
            scratch_shapes=[
                *(pltpu.VMEM((slots, heads, *array.tile), array.pool.dtype) for array in arrays),
                *[pltpu.SemaphoreType.DMA((slots,))] * 2,
                pltpu.SMEM((2,), jnp.int32),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in pool],
        input_output_aliases={5: 0, 6: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=_VMEM_BYTES,
            disable_bounds_checks=True,  # runs are within the pool; checks double a copy's work
            disable_semaphore_checks=True,
        ),
        name="write_kv",
        interpret=interpret or False,
    )(work, *(source for source in sources for _ in range(2)), *pool)


def _per_word(array):
    """Elements per 32-bit word."""
    return 4 // array.dtype.itemsize


def _words(elements):
    """32-bit words of elements [rows, columns], each of neighbouring rows."""
    return pltpu.bitcast(elements, jnp.uint32)
