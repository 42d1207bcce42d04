"""Trainer checkpoints, independent of backend and number of ranks."""
