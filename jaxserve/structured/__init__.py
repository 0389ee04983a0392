"""Structured outputs: JSON schema, regex, choice or grammar. Imports no JAX."""

from jaxserve.core.requests.structured_outputs import StructuredOutputs

__all__ = ["StructuredOutputs"]
