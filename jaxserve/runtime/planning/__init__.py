"""What an engine will be: decided before a weight is read."""
