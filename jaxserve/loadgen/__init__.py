"""A load for any OpenAI endpoint: sent at its own times, and what it met with, as numbers."""
