"""Takes generated text apart: reasoning, content, tool calls."""
