"""Prompts of a body: text or token ids, or a list of either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator

from jaxserve.core.errors import PromptTooLongError, RequestError
from jaxserve.engine.prompts import TokenizedPrompt
from jaxserve.protocol.errors import FieldError
from jaxserve.protocol.field_types import Integer, ListOf
from jaxserve.protocol.model import Model

MAX_PROMPTS = 2048


def _of_one_kind(given: Any) -> Any:
    """One error message for a bad prompt, instead of one per branch of the union."""
    kinds = {type(part) for part in given} if isinstance(given, list) else {None}
    if isinstance(given, str) or kinds in (set(), {str}, {int}, {list}):
        return given
    if kinds <= {int, float} and all(part % 1 == 0 for part in given):
        return given
    raise ValueError("must be text, token ids, or a list of either")


Prompts = Annotated[
    str | ListOf[str] | ListOf[Integer] | ListOf[ListOf[Integer]], BeforeValidator(_of_one_kind)
]


def tokenized(
    model: Model,
    field: str,
    given: str | Sequence[Any],
    add_special_tokens: bool | None,
    truncates: bool,
) -> list[TokenizedPrompt]:
    """The prompts of a field, which are cut off later where that `truncates` them.

    Raises FieldError for no prompts, too many, or one that is empty or cannot be read, and
    PromptTooLongError.
    """
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not 1 <= len(given) <= MAX_PROMPTS:
        raise FieldError(field, f"must hold 1 to {MAX_PROMPTS} prompts, got {len(given)}.")
    try:
        special = add_special_tokens is not False
        prompts = [model.tokenize(prompt, special, truncates) for prompt in given]
    except PromptTooLongError:
        raise
    except RequestError as error:
        raise FieldError(field, f"cannot be read: {error}") from None
    if not all(prompt.token_ids for prompt in prompts):
        raise FieldError(field, "is empty; it needs at least one token.")
    return prompts
