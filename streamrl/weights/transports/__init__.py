"""Transports of weights between processes."""
