"""`jaxserve serve`: OpenAI's HTTP interface to an engine."""
