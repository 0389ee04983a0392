"""From a model's name to arrays on devices: open a checkpoint, check it, load its parameters."""
