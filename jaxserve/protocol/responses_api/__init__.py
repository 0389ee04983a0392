"""OpenAI's `/v1/responses`: answers as lists of items, from and to those of chats."""
