"""OpenAI's requests and answers as data: no HTTP here, so that batch files use them too."""
