"""Weights of linear layers that a checkpoint stores in several tensors each: values and scales."""
