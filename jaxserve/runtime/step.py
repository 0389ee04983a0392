"""The functions that become programs: forward a batch, sample a token.

They are pure, their shapes are fixed by a StepLayout, and what they replace (KV pages, last
tokens, sampling state) is donated to them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.models.config import ModelConfig
from jaxserve.models.family import Family, Params
from jaxserve.runtime.batch import StepLayout
from pallas_kernels.paged_attention import KVPages, paged_attention, write_kv


def forward(
    family: Family,
    config: ModelConfig,
    layout: StepLayout,
    params: Params,
    kv: list[KVPages],
    last_tokens: jax.Array,
    metadata: jax.Array,
) -> tuple[list[KVPages], jax.Array, jax.Array]:
    """Run the model over one packed step.

    `kv` holds one KVPages a layer, `last_tokens` [slots] int32 the newest token of every slot.
    Returns the pages with the step's keys and values written, the hidden states to sample from
    [hidden, sample_rows], and those of the prefill tokens [hidden, prefill_tokens].
    """
    step = layout.unpack(metadata)
    token_ids = jnp.concatenate([last_tokens[step.slots], step.prefill_ids])
    kv = list(kv)

    def attention(layer, q, k, v, *, window):
        kv[layer] = write_kv(kv[layer], k, v, step.page_ids, step.offsets)
        out, _ = paged_attention(
            q,
            kv[layer],
            step.batch,
            num_decodes=layout.key.rows,
            scale=config.attention_scale,
            window=window,
        )
        return out

    hidden = family.forward(params, config, token_ids, step.positions, attention)
    return kv, hidden[:, step.sampled], hidden[:, layout.key.rows :]
