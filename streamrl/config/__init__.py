"""Run configuration: read and check a run's settings, inputs and resource demands."""
