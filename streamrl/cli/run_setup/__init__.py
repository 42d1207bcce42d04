"""Run directories: claim, create and resume them; stop a run on a signal."""
