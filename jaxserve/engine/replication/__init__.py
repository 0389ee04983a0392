"""One engine on several hosts: each runs it, by the commands and times of host 0."""
