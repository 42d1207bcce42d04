"""Assemble ready groups into training steps, and training steps into micro-batches."""
