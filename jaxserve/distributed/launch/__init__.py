"""Starting one process for each host of a job. One module a backend.

A backend is a frozen dataclass of its own options with two methods: `dry_run(job)` returns what
would be run or submitted, as text, and `run(job)` does it and returns the job's exit status. Both
raise ConfigError for a job that it cannot start.
"""
