"""Searches for the best placement: set partitions and annealing."""
