"""Parts of the coordinator: evaluation, checkpoints, step reports, events for the driver."""
