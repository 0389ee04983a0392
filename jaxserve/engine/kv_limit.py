"""How much KV memory a sequence may ever need, and whether there can be as much."""

from __future__ import annotations

from jaxserve.engine.sequence import Sequence
from jaxserve.errors import PromptTooLongError, RequestError
from jaxserve.kv.pages import PagePool


def kv_limit(seq: Sequence, max_model_len: int, pool: PagePool) -> int:
    """Tokens whose KV a sequence may need, as in `Sequence.kv_limit`.

    Raises RequestError for an empty prompt, PromptTooLongError for one that leaves no room in the
    context or that, with its `max_tokens`, can never fit the pool.
    """
    length = seq.num_prompt
    if not length:
        raise RequestError("the prompt has no tokens; it needs at least one")
    if length >= max_model_len:
        raise PromptTooLongError(
            f"the prompt has {length} tokens and the context limit is {max_model_len}; "
            f"shorten it to at most {max_model_len - 1}"
        )
    room = max_model_len - length
    pool_tokens = pool.capacity * pool.page_size
    wanted = seq.params.max_tokens
    if wanted is None:  # As far as the context goes, or a pool that is smaller still.
        wanted = max(1, pool_tokens + 1 - length)
    max_tokens = min(wanted, room)
    limit = length + max_tokens - 1
    pages = pool.pages_for(limit)
    if pages > pool.capacity:
        raise PromptTooLongError(
            f"a prompt of {length} tokens with max_tokens {max_tokens} needs {pages} KV pages "
            f"and the pool has {pool.capacity}; prompt and max_tokens may add up to "
            f"{pool_tokens + 1} tokens"
        )
    return limit
