"""Anthropic's `/v1/messages`: answers as lists of content blocks, from and to those of chats."""
