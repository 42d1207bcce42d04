"""A rank of a trainer: backends, tasks, batches and optimizer state."""
