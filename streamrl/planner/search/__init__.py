"""Searches for the best placement: set partitions, annealing, published rules."""
