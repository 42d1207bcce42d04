"""The trainer's rank: backends, tasks, batches, optimizer state."""
