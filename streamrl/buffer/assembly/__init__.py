"""Assemble ready groups into steps, and steps into micro-batches."""
