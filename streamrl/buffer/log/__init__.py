"""Durable, append-only segment files with group commit."""
