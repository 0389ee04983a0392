"""Model loading: open a checkpoint, check it, load its parameters onto devices."""
