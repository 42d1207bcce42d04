"""Calls between actors: over connections of their own to shards, and through Ray."""
