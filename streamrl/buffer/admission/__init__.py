"""Decide how many prompts enter: staleness credits, shard capacity, oversampling."""
