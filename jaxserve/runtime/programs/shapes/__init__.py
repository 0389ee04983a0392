"""The shapes and shardings of all that programs take and give."""
