"""Worker groups with real engines, and a queue without a run, for own loops."""
