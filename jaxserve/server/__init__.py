"""`jaxserve serve`: an OpenAI-compatible HTTP server for an engine."""
