"""Load, split, adapt and save transformers models."""
