"""GGUF files: their header, their metadata as a config, their tensors."""
