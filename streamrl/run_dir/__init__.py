"""Run directory: owner, checkpoints, control requests, crash stacks."""
