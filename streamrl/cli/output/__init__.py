"""Format what the commands print and write."""
