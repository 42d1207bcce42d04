"""Carry calls, columns and weights between processes."""
