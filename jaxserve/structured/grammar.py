"""Compiles the structured outputs of a request to a grammar, within size limits."""

from __future__ import annotations

import functools
import json
import re

import llguidance
import llguidance.numpy
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark

from jaxserve.core.errors import RequestError
from jaxserve.core.requests.structured_outputs import StructuredOutputs
from jaxserve.structured.closed_schema import close_objects
from jaxserve.structured.matcher import Matcher, error_of
from jaxserve.structured.vocabulary import Vocabulary

JSON_WHITESPACE = r"[ \t\n\r]{1,40}"
"""Whitespace between JSON tokens. Bounded, so that output of a bounded schema ends; wide enough for
indentation."""

_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)

LIMITS = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""Limits of llguidance. They count work, not time, so that a grammar behaves the same on every
machine."""


class Grammar:
    """A compiled grammar, for any number of sequences."""

    def __init__(self, vocabulary: Vocabulary, spec: StructuredOutputs) -> None:
        """Raises RequestError for a grammar that is invalid, too large, or allows no text."""
        self._vocabulary = vocabulary
        self._matcher = llguidance.LLMatcher(
            vocabulary.tokenizer, _source(spec), limits=_limits(), log_level=0
        )
        self._mask = np.zeros((1, vocabulary.words), np.int32)
        if not self._matcher.is_error():
            llguidance.numpy.fill_next_token_bitmask(self._matcher, self._mask)
        if self._matcher.is_error():
            raise RequestError(f"structured_outputs.{spec.kind}: {error_of(self._matcher)}.")
        if self.matcher(ignore_eos=False).complete(0):
            raise RequestError(f"structured_outputs.{spec.kind} allows no text but the empty one.")

    def matcher(self, *, ignore_eos: bool) -> Matcher:
        """A new matcher in the initial state. With `ignore_eos` it masks end-of-text tokens."""
        matcher = self._matcher.deep_copy()
        return Matcher(self._vocabulary, matcher, self._mask[0], ignore_eos=ignore_eos)


def _source(spec: StructuredOutputs) -> str:
    """Converts a spec to llguidance's grammar format. Raises RequestError if that fails."""
    compiler = llguidance.LLMatcher
    match spec.kind:
        case "json":
            return _source_of_schema(spec.json, spec.disable_additional_properties is not False)
        case "json_object":
            return _source_of_schema('{"type": "object"}', closes=False)
        case "regex":
            return compiler.grammar_from_regex(spec.regex)
        case "choice":
            quoted = (json.dumps(choice, ensure_ascii=False) for choice in spec.choice)
            return compiler.grammar_from_lark(f"start: {' | '.join(quoted)}")
        case "grammar":
            if not _GBNF_RULE.search(spec.grammar):
                return compiler.grammar_from_lark(spec.grammar)
            try:
                return compiler.grammar_from_lark(gbnf_to_lark(spec.grammar))
            except Exception as error:  # It raises bare Exception.
                raise RequestError(f"structured_outputs.grammar: {error}.") from error


def _source_of_schema(text: str, closes: bool) -> str:
    """Grammar of a JSON schema with bounded whitespace, unless the schema sets its own whitespace
    in llguidance's `x-guidance`. `closes` its objects, as `close_objects` does."""
    schema = json.loads(text)
    own = schema.get("x-guidance")
    options = isinstance(own, dict) and any(name.startswith("whitespace") for name in own)
    defaults = {} if options else {"whitespace_pattern": JSON_WHITESPACE}
    try:
        if closes:
            close_objects(schema)
            text = json.dumps(schema, allow_nan=False, ensure_ascii=False)
        return llguidance.LLMatcher.grammar_from_json_schema(text, defaults=defaults)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs.json: {error}.") from error


@functools.cache
def _limits() -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(**LIMITS)
