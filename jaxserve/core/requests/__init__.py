"""A request as its user states it and as it is answered."""
