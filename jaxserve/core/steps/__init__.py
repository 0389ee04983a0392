"""A step as plain data: its shape, its plan, what it asks of a device."""
