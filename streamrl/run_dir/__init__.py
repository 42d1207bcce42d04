"""A run directory: owner, checkpoints, control requests, crash stacks."""
