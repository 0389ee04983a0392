"""Tokenizers, chat templates and incremental detokenization. Imports no JAX."""

from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "Tokenizer"]
