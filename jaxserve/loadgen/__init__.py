"""Open-loop load generator for any OpenAI endpoint, and statistics of the results."""
