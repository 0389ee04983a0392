"""Startup: an engine is planned, its programs are compiled, and its weights are loaded."""
