"""The same work in PyTorch. Whatever fails here says nothing about us."""

from __future__ import annotations

import functools
import statistics
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel
from torch.nn.attention.experimental import _paged_attention as flex_paged

from device.attention import Attention
from device.packed_weights import PackedMatmul
from device.page_moves import PageMove

DEVICE = "cuda"
REPEATS = 5
REPEAT_MS = 50
MAX_RUNS = 100


Work = tuple[Callable[[], tuple], Callable[..., torch.Tensor]]
"""The inputs of one call, made for each call, and what is computed of them."""


class Peer(NamedTuple):
    """prepare: brings about its Work on the device."""

    name: str
    prepare: Callable[[], Work]


def seconds_a_call(peer: Peer, calls: int) -> float:
    """As `measure.seconds_a_call`: several calls in one graph, each on data of its own."""
    with torch.inference_mode():
        make_inputs, compute = peer.prepare()
        inputs = [make_inputs() for _ in range(calls)]

        def run():
            for arguments in inputs:
                compute(*arguments)

        # As the capture of graphs wants it, what is first run is run on another stream.
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run()
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()

        def elapsed_ms(runs: int) -> float:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(runs):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            return begin.elapsed_time(end) / runs

        elapsed_ms(1)
        runs = int(min(MAX_RUNS, max(1, REPEAT_MS / elapsed_ms(1))))
        return statistics.median(elapsed_ms(runs) for _ in range(REPEATS)) / calls / 1e3


def answers() -> bool:
    """Whether the device still does what it is told."""
    try:
        torch.zeros(1, device=DEVICE).item()
    except RuntimeError:
        return False
    return True


def peers(spec: object) -> Iterator[Peer]:
    """Those that can do a case."""
    prepare: dict[str, Callable[[Any], Work]] = {}
    if isinstance(spec, Attention) and (spec.is_plain_decode or spec.is_plain_prefill):
        prepare |= {
            "torch SDPA, flash": functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION),
            "torch SDPA, cuDNN": functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
            "FlexAttention": _flex,
            "transformers, paged": _transformers,
        }
    if isinstance(spec, Attention) and spec.is_plain_decode:
        prepare["FlexAttention, paged"] = _flex_paged
    if isinstance(spec, PageMove):
        prepare["torch, all layers as one array"] = _page_move
    if isinstance(spec, PackedMatmul) and spec.format.values == "int4" and spec.tokens <= 64:
        prepare["torch _weight_int4pack_mm"] = _tiny_gemm
    if isinstance(spec, PackedMatmul) and spec.dtype == "float8_e4m3fn":
        prepare["torch _scaled_mm"] = _scaled_mm
    for name, how in prepare.items():
        yield Peer(name, functools.partial(how, spec))


def _random(*shape: int, dtype: str = "bfloat16") -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).to(getattr(torch, dtype))


def _together(spec):
    """q, k, v [rows, heads, tokens, head_dim]: each row's keys in one piece."""
    rows, context, new = len(spec.contexts), spec.contexts[0], spec.lengths[0]
    kv = (rows, spec.kv_heads, context, spec.head_dim)
    return (
        _random(rows, spec.heads, new, spec.head_dim, dtype=spec.dtype),
        _random(*kv, dtype=spec.dtype),
        _random(*kv, dtype=spec.dtype),
    )


def _sdpa(backend, spec):
    def compute(q, k, v):
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=bool(spec.chunks), scale=spec.scale, enable_gqa=True
            )

    return functools.partial(_together, spec), compute


def _causal(batch, head, query, position):
    return query >= position


def _flex(spec):
    attend = torch.compile(flex_attention.flex_attention)
    mask = None
    if spec.chunks:
        tokens = spec.lengths[0]
        mask = flex_attention.create_block_mask(_causal, None, None, tokens, tokens, DEVICE)
    compute = functools.partial(attend, block_mask=mask, scale=spec.scale, enable_gqa=True)
    return functools.partial(_together, spec), compute


def _flex_paged(spec):
    """Pages of one pool [1, heads, tokens of all pages, head_dim], and a mask that knows where."""
    rows, context = len(spec.contexts), spec.contexts[0]
    num_pages = spec.pages.num_pages - 1
    pool = flex_paged.PagedAttention(num_pages, spec.page_size, rows, DEVICE)
    pool.empty_pages = torch.randperm(num_pages).tolist()
    row = torch.arange(rows, device=DEVICE)
    for each in row:
        pool.reserve(each[None], torch.tensor([context], device=DEVICE))
    logical = flex_attention.create_block_mask(
        flex_attention.noop_mask,
        rows,
        None,
        1,
        context,
        DEVICE,
        BLOCK_SIZE=(flex_attention._DEFAULT_SPARSE_BLOCK_SIZE, spec.page_size),
    )
    mask = pool.convert_logical_block_mask(logical, row)
    attend = torch.compile(flex_attention.flex_attention)

    def inputs():
        kv = (1, spec.kv_heads, num_pages * spec.page_size, spec.head_dim)
        return (
            _random(rows, spec.heads, 1, spec.head_dim, dtype=spec.dtype),
            _random(*kv, dtype=spec.dtype),
            _random(*kv, dtype=spec.dtype),
        )

    return inputs, functools.partial(attend, block_mask=mask, scale=spec.scale, enable_gqa=True)


def _transformers(spec):
    """Its paged cache keeps tokens in any order, and each row's indices of them.

    All rows are one sequence to it, of which a mask lets each token see its own row.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module = types.SimpleNamespace(num_key_value_groups=spec.heads // spec.kv_heads)
    row = torch.arange(len(spec.contexts), device=DEVICE)
    contexts, lengths = (
        torch.tensor(each, device=DEVICE) for each in (spec.contexts, spec.lengths)
    )
    row_of_key, row_of_query = (row.repeat_interleave(each) for each in (contexts, lengths))
    position = torch.cat([torch.arange(n, device=DEVICE) for n in spec.contexts])
    until = torch.cat(
        [torch.arange(c - n, c, device=DEVICE) + 1 for c, n in zip(spec.contexts, spec.lengths)]
    )
    seen = (row_of_query[:, None] == row_of_key) & (position < until[:, None])
    mask = torch.zeros((1, 1, *seen.shape), device=DEVICE, dtype=getattr(torch, spec.dtype))
    mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)

    def inputs():
        cache = (len(position), spec.kv_heads, spec.head_dim)
        return (
            _random(1, spec.heads, len(until), spec.head_dim, dtype=spec.dtype),
            _random(*cache, dtype=spec.dtype),
            _random(*cache, dtype=spec.dtype),
            torch.randperm(len(position), device=DEVICE),
        )

    def compute(q, k, v, index):
        k, v = (cache[index].transpose(0, 1)[None] for cache in (k, v))
        out, _ = sdpa_attention_forward(module, q, k, v, mask, scaling=spec.scale)
        return out

    return inputs, compute


def _page_move(spec):
    elements = spec.whole_page_bytes // 2
    pool = _random(spec.num_pages, elements)

    def inputs():
        ids = torch.randperm(spec.num_pages, device=DEVICE)[: spec.moved]
        return (ids,) if spec.direction == "gather" else (ids, _random(spec.moved, elements))

    if spec.direction == "gather":
        return inputs, lambda ids: pool.index_select(0, ids)
    return inputs, lambda ids, rows: pool.index_copy_(0, ids, rows)


def _tiny_gemm(spec):
    group = spec.format.group_size
    inner_tiles = 8

    def inputs():
        values = torch.randint(
            0, 256, (spec.num_outputs, spec.num_inputs // 2), device=DEVICE, dtype=torch.uint8
        )
        packed = torch.ops.aten._convert_weight_to_int4pack(values, inner_tiles)
        scales = _random(spec.num_inputs // group, spec.num_outputs, 2)
        return _random(spec.tokens, spec.num_inputs), packed, scales

    def compute(x, packed, scales):
        return torch.ops.aten._weight_int4pack_mm(x, packed, group, scales)

    return inputs, compute


def _scaled_mm(spec):
    def inputs():
        x = _random(max(16, spec.tokens), spec.num_inputs, dtype=spec.dtype)
        weight = _random(spec.num_outputs, spec.num_inputs, dtype=spec.dtype)
        return x, weight, *(torch.ones(len(each), device=DEVICE) for each in (x, weight))

    def compute(x, weight, x_scale, weight_scale):
        return torch._scaled_mm(
            x, weight.T, x_scale[:, None], weight_scale[None], out_dtype=torch.bfloat16
        )

    return inputs, compute
