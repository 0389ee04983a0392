"""OpenAI requests and responses as data, without HTTP, so that batch jobs can use them too."""
