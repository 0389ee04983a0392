"""The Hopper kernels under the contract of paged attention, interpreted on the host.

Cases are made to be of what the kernels can do: pages of 16, head_dim 64, bfloat16. The interpreter
compiles each program for seconds, so options have one value each.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_paged_attention import Case, PagedAttentionContract
from unoptimised import UNOPTIMISED

from pallas_kernels.compat import gpu as compat
from pallas_kernels.paged_attention import api, paged_attention
from pallas_kernels.paged_attention.gpu import attention

pytestmark = pytest.mark.interpreted


class TestInterpreted(PagedAttentionContract):
    implementation = staticmethod(functools.partial(paged_attention, backend="xla"))
    page_of_groups = 16
    tolerance = 0.03

    # Of these the kernels' own tests have more, in shapes that concern them.
    test_around_a_page_boundary = None
    test_ratios_of_query_heads_to_kv_heads = None
    test_a_long_chunk_takes_several_blocks_of_queries_and_of_context = None
    test_more_decodes_than_are_attended_to_together = None
    test_any_ragged_batch = None
    test_any_groups = None
    test_groups_of_more_tokens_than_a_tile_over_several_blocks = None
    test_any_ranges = None
    test_half_precision = None

    @pytest.mark.parametrize("window", [5])
    def test_windows(self, window):
        super().test_windows(window)

    @pytest.mark.parametrize("padding", [5])
    def test_padding_gets_nothing(self, padding):
        super().test_padding_gets_nothing(padding)

    @pytest.mark.parametrize("window", [5])
    def test_a_decode_row_does_not_depend_on_its_neighbours(self, window):
        super().test_a_decode_row_does_not_depend_on_its_neighbours(window)

    @pytest.mark.parametrize("window", [6])
    def test_sinks_take_their_share(self, window):
        super().test_sinks_take_their_share(window)

    @pytest.mark.parametrize("window", [7])
    @pytest.mark.parametrize("soft_cap", [2.0])
    def test_trees(self, window, soft_cap):
        super().test_trees(window, soft_cap)

    @pytest.mark.parametrize("num_decodes", [0, 2])
    @pytest.mark.parametrize("width", [3])
    def test_tokens_after_the_last_row_belong_to_no_row(self, num_decodes, width):
        super().test_tokens_after_the_last_row_belong_to_no_row(num_decodes, width)

    @pytest.mark.parametrize("dtype", [jnp.int8])
    def test_scales_of_tokens(self, dtype):
        super().test_scales_of_tokens(dtype)

    @pytest.fixture(autouse=True)
    def one_multiprocessor(self, monkeypatch):
        monkeypatch.setattr(compat, "num_sms", lambda: 1)

    def case(self, *rows, page_size, **kind):
        case = Case(*rows, page_size=16, **{"dim": 64} | kind)
        case.q = np.asarray(jnp.asarray(case.q, jnp.bfloat16))
        case.pages = jax.tree.map(
            lambda array: np.asarray(jnp.asarray(array, jnp.bfloat16)), case.pages
        )
        return case

    def run(self, case, compiler_options=UNOPTIMISED, **options):
        """In the place of XLA, so that no device is asked for."""
        with compat.gpu_interpreter() as interpreter, pytest.MonkeyPatch.context() as patch:
            kernel = functools.partial(attention.paged_attention, interpret=interpreter)
            patch.setattr(api, "_ATTEND", dataclasses.replace(api._ATTEND, xla=kernel))
            return super().run(case, compiler_options, **options)
