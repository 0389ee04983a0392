"""Output of a given form: JSON of a schema, a regex, a choice, a grammar. No JAX in here."""

from jaxserve.structured.params import StructuredOutputs

__all__ = ["StructuredOutputs"]
