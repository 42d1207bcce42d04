"""Transports of weights between processes, one or two files each."""
