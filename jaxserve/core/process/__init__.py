"""What a process shares with its surroundings: files, signals, logs, the terminal."""
