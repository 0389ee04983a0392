"""What an engine takes of memory, decided before anything is allocated."""
