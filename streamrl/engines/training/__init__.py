"""A rank of a trainer: backends, tasks (model and loss), batches and optimizer state."""
