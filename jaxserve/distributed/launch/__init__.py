"""Launch one process per host of a job. One module per backend.

A backend is a frozen dataclass of its options with two methods: `dry_run(job)` returns what would
be run or submitted, as text, and `run(job)` does it and returns the job's exit status. Both raise
ConfigError for a job that the backend cannot start.
"""
