"""How a command line becomes settings."""
