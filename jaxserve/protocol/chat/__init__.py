"""`/v1/chat/completions`: requests and replies."""
