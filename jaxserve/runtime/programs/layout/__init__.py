"""What a step is given: the copy of its plan, its upload, and what the model gets of it."""
